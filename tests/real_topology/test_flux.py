"""Flux.1 dev at its own widths, with random weights: a few of the blocks of its networks.

A picture of 256x256 in bfloat16 equals stock's, also with a LoRA in kohya's layout, whose converter in Diffusers knows
these widths only. It takes 4 GB of disk, 6 GB of memory and some minutes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel

from tests.real_topology.test_stable_diffusion import draw, in_process, stock_picture
from tests.real_topology.test_stable_diffusion_3 import clip_config, clip_tokenizer, t5_encoder, wide_vae
from tests.samples.family_models import t5_tokenizer
from tests.samples.transformer_loras import kohya_file, random_lora
from tests.support.stock import Pixels

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

# Of 19 joint blocks and 38 single ones.
JOINT, SINGLE = 2, 2


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bottega-real-topology-") as made:
        folder = Path(made) / "flux-dev"
        in_process(_write, folder)
        yield folder


def test_a_picture_is_stocks(folder: Path) -> None:
    drawn, _, _ = in_process(draw, folder)
    _check(drawn, in_process(_draw_stock, folder))


def test_a_picture_with_a_lora_is_stocks(folder: Path, tmp_path: Path) -> None:
    file = in_process(_write_lora, folder, tmp_path)
    drawn, _, _ = in_process(draw, folder, file)
    _check(drawn, in_process(_draw_stock, folder, file))
    plain, _, _ = in_process(draw, folder)
    assert np.abs(drawn.astype(int) - plain).max() > 1


def _check(drawn: Pixels, stock: Pixels) -> None:
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


def _write_lora(model: Path, folder: Path) -> Path:
    """Write a LoRA of all layers that stock reads: those of the blocks, and CLIP's."""
    lora = random_lora(model, seed=1, rank=4, alpha=2.0)
    blocks = {name: part for name, part in lora.originals.items() if "_blocks." in name}
    text = {part: factors for part, factors in lora.text.items() if part[0] == "text_encoder"}
    return kohya_file(replace(lora, originals=blocks, text=text), folder)


def _draw_stock(folder: Path, lora: Path | None = None) -> Pixels:
    torch.set_num_threads(2)
    pipeline = FluxPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    if lora is not None:
        pipeline.load_lora_weights(lora, use_safetensors=True)
    return stock_picture(pipeline)
