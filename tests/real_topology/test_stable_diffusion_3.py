"""Stable Diffusion 3 medium at its own widths, with random weights: a few of the blocks of its networks, and of T5's.

A picture of 256x256 in bfloat16 equals stock's. It takes 4 GB of disk, 8 GB of memory and a minute.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, T5Config, T5EncoderModel

from bottega.miniature import WEIGHTS
from tests.real_topology.test_stable_diffusion import draw, in_process, stock_picture
from tests.samples.family_models import t5_tokenizer
from tests.support.stock import Pixels

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

# Of 24 blocks each.
BLOCKS = 3


def test_a_picture_is_stocks() -> None:
    with tempfile.TemporaryDirectory(prefix="bottega-real-topology-") as made:
        folder = Path(made) / "stable-diffusion-3"
        in_process(_write, folder)
        drawn, _, _ = in_process(draw, folder)
        stock = in_process(_draw_stock, folder)
    assert stock.std() > 1  # levels: the picture is not of one colour
    assert np.abs(drawn.astype(int) - stock).max() <= 1


def _write(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    tokenizers = [clip_tokenizer(name) for name in ("tokenizer", "tokenizer_2")]
    encoders = [
        CLIPTextModelWithProjection(clip_config(tokenizer, width, activation))
        for tokenizer, width, activation in zip(tokenizers, (768, 1280), ("quick_gelu", "gelu"), strict=True)
    ]
    transformer = SD3Transformer2DModel(
        sample_size=128,
        num_layers=BLOCKS,
        num_attention_heads=24,
        caption_projection_dim=1536,
        pos_embed_max_size=192,
    )
    StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=wide_vae(scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=encoders[0],
        tokenizer=tokenizers[0],
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizers[1],
        text_encoder_3=t5_encoder(),
        tokenizer_3=t5_tokenizer(),
    ).to(torch.bfloat16).save_pretrained(folder)


def clip_tokenizer(name: str) -> CLIPTokenizer:
    """Return the embedded model's tokenizer, which makes as many tokens as published ones."""
    tokenizer = CLIPTokenizer.from_pretrained(WEIGHTS / name)
    tokenizer.model_max_length = 77
    return tokenizer


def clip_config(tokenizer: CLIPTokenizer, width: int, activation: str) -> CLIPTextConfig:
    """Return the configuration of a published CLIP text encoder with fewer layers."""
    return CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=BLOCKS,
        num_attention_heads=width // 64,
        hidden_act=activation,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def t5_encoder() -> T5EncoderModel:
    """Return T5 XXL's encoder with fewer blocks."""
    config = T5Config(
        vocab_size=32128,
        d_model=4096,
        d_kv=64,
        d_ff=10240,
        num_layers=BLOCKS,
        num_heads=64,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config)


def wide_vae(**factors: float) -> AutoencoderKL:
    """Return the VAE of published transformers, with their scaling and shift."""
    levels = 4
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        sample_size=1024,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **factors,
    )


def _draw_stock(folder: Path) -> Pixels:
    torch.set_num_threads(2)
    return stock_picture(StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.bfloat16))
