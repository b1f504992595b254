"""Z-Image at its own widths, with random weights: a few of the blocks of its networks.

A guided picture of 256x256 in bfloat16 equals stock's. It takes 3 GB of disk, 5 GB of memory and two minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import nn
from transformers import Qwen3Config, Qwen3Model

from tests.real_topology.test_stable_diffusion import draw, in_process, stock_picture
from tests.real_topology.test_stable_diffusion_3 import wide_vae
from tests.samples.family_models import chat_tokenizer
from tests.support.stock import Pixels

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

# Of 30 blocks and 2 refiners, and of the text encoder's 36 layers.
BLOCKS, REFINERS, LAYERS = 2, 1, 2


def test_a_picture_is_stocks() -> None:
    with tempfile.TemporaryDirectory(prefix="bottega-real-topology-") as made:
        folder = Path(made) / "z-image"
        in_process(_write, folder)
        drawn, _, _ = in_process(draw, folder)
        stock = in_process(_draw_stock, folder)
    assert stock.std() > 1  # levels: the picture is not of one colour
    assert np.abs(drawn.astype(int) - stock).max() <= 1


def _write(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    transformer = ZImageTransformer2DModel(n_layers=BLOCKS, n_refiner_layers=REFINERS, axes_lens=[1536, 512, 512])
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        nn.init.normal_(token)
    ZImagePipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=wide_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=Qwen3Model(_text_config()),
        tokenizer=chat_tokenizer(),
    ).to(torch.bfloat16).save_pretrained(folder)


def _text_config() -> Qwen3Config:
    """Return the configuration of Qwen3 with 4 billion weights, but for layers and vocabulary."""
    return Qwen3Config(
        vocab_size=len(chat_tokenizer()),
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=1_000_000.0,
    )


def _draw_stock(folder: Path) -> Pixels:
    torch.set_num_threads(2)
    return stock_picture(ZImagePipeline.from_pretrained(folder, dtype=torch.bfloat16))
