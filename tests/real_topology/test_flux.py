"""Flux.1 dev at its own widths, with random weights: a few of the blocks of its networks.

A picture of 256x256 in bfloat16 equals stock's. It takes 4 GB of disk, 6 GB of memory and two minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel

from tests.real_topology.test_stable_diffusion import draw, in_process, stock_picture
from tests.real_topology.test_stable_diffusion_3 import clip_config, clip_tokenizer, t5_encoder, wide_vae
from tests.samples.family_models import t5_tokenizer
from tests.support.stock import Pixels

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

# Of 19 joint blocks and 38 single ones.
JOINT, SINGLE = 2, 2


def test_a_picture_is_stocks() -> None:
    with tempfile.TemporaryDirectory(prefix="bottega-real-topology-") as made:
        folder = Path(made) / "flux-dev"
        in_process(_write, folder)
        drawn, _, _ = in_process(draw, folder)
        stock = in_process(_draw_stock, folder)
    assert stock.std() > 1  # levels: the picture is not of one colour
    assert np.abs(drawn.astype(int) - stock).max() <= 1


def _write(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    tokenizer = clip_tokenizer("tokenizer")
    FluxPipeline(
        transformer=FluxTransformer2DModel(num_layers=JOINT, num_single_layers=SINGLE, guidance_embeds=True),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=wide_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=CLIPTextModel(clip_config(tokenizer, 768, "quick_gelu")),
        tokenizer=tokenizer,
        text_encoder_2=t5_encoder(),
        tokenizer_2=t5_tokenizer(),
    ).to(torch.bfloat16).save_pretrained(folder)


def _draw_stock(folder: Path) -> Pixels:
    torch.set_num_threads(2)
    return stock_picture(FluxPipeline.from_pretrained(folder, dtype=torch.bfloat16))
