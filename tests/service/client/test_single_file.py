"""A model in a single file, from `bottega up` to a picture: that of stock Diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)

from bottega.client import Client
from bottega.model_files.family_names import TITLES
from tests.samples.single_files import write_single_file
from tests.support.running_up import running_up
from tests.support.stock import assert_same_image, pixels_of

PROMPT = "a big red star on the left on a blue background"
DRAW: Mapping[str, Any] = {"num_inference_steps": 2, "guidance_scale": 5.0, "width": 64, "height": 64}


@pytest.mark.slow  # tests/unit/model_files/test_importing.py has the conversion, and test_up.py the suite
@pytest.mark.parametrize(
    ("family", "pipeline", "scheduler"),
    [
        ("sd15", StableDiffusionPipeline, PNDMScheduler),
        ("sd21", StableDiffusionPipeline, DDIMScheduler),
        ("sdxl", StableDiffusionXLPipeline, EulerDiscreteScheduler),
    ],
)
def test_a_suite_draws_from_a_single_file_as_stock_does(
    family: str, pipeline: Any, scheduler: Any, tmp_path: Path
) -> None:
    file = write_single_file(tmp_path / "scenes.safetensors", family, dtype=torch.float32)
    options = ("--model", file, "--threads", 1, "--device", "cpu", "--dtype", "float32", "--controlnet-servers", 0)
    with running_up(tmp_path / "up", *options) as up, Client(up.record().address) as client:
        drawn = client.generate(PROMPT, seed=7, **DRAW)
        assert [model.name for model in client.models()] == ["scenes"]
        (folder,) = (up.state.root / "imported").iterdir()
    stock = pipeline.from_single_file(str(file), config=str(folder), local_files_only=True)
    stock.scheduler = scheduler.from_config(stock.scheduler.config)
    wanted = stock(PROMPT, generator=torch.Generator().manual_seed(7), **DRAW).images[0]
    assert_same_image(pixels_of(drawn.pil()), pixels_of(wanted))
    printed = " ".join(up.printed.read_text().split())
    assert "converting unet" in printed
    guess = "v_prediction" if family == "sd21" else "epsilon"
    assert f"Prediction type: {guess}, a guess: the default of {TITLES[family]}; for a" in printed
