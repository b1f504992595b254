"""The networks of the report are SDXL-base's own, and what is written of them is a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from load.gpu_report.random_model import write_model
from load.gpu_report.topology import SDXL, SMALL


def test_every_part_has_as_many_weights_as_sdxl_base() -> None:
    with torch.device("meta"):
        parts = {
            "unet": UNet2DConditionModel(**SDXL.unet),
            "vae": AutoencoderKL(**SDXL.vae),
            "text": CLIPTextModel(CLIPTextConfig(**SDXL.text)),
            "text_2": CLIPTextModelWithProjection(CLIPTextConfig(**SDXL.text_2)),
        }
    weights = {name: sum(each.numel() for each in part.parameters()) for name, part in parts.items()}
    assert weights == {"unet": 2_567_463_684, "vae": 83_653_863, "text": 123_060_480, "text_2": 694_659_840}


def test_the_same_seed_writes_the_same_finite_weights(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_model(tmp_path / name, SMALL, "cpu", torch.float32)
    one, other = (
        UNet2DConditionModel.from_pretrained(tmp_path / name / "unet", use_safetensors=True).state_dict()
        for name in ("one", "other")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(tensor.isfinite().all() for tensor in one.values())
    assert one["conv_in.weight"].std() == pytest.approx((4 * 9) ** -0.5, rel=0.1)
