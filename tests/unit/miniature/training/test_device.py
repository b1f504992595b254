"""The training computes on the device that it is told: no step mixes it with the processor. No GPU is needed to see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bottega.errors import ConfigError
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import DRAWN
from load.miniature.training.controlnet import ControlNetRecipe, ControlNetStage
from load.miniature.training.corpus import Corpus, Latents, draw_corpus, encode
from load.miniature.training.device import half_precision, pick_device
from load.miniature.training.loop import Stage
from load.miniature.training.lora import LORAS, LoraStage
from load.miniature.training.parts import Parts, load_parts
from load.miniature.training.stages import STEPS
from load.miniature.training.text import TextRecipe, TextStage
from load.miniature.training.train import Training, train
from load.miniature.training.unet import UnetRecipe, UnetStage
from load.miniature.training.vae import VaeRecipe, VaeStage

# A stage of each kind; the others, which learn alike, are slow.
QUICK = {"vision", "edges", "checked"}

# Tensors of it have shapes and no values; they refuse to meet those of another device, as a GPU's do.
META = torch.device("meta")


def _plain_descent(parameters: Iterable[Any], **_: object) -> torch.optim.Optimizer:
    """The training's own optimizer is fused, which this device does not know."""
    return torch.optim.SGD(parameters, lr=0.1)


def _stage(name: str, parts: Parts, corpus: Corpus, latents: Latents) -> Stage:
    if name in {"text", "vision"}:
        return TextStage(parts, corpus, TextRecipe(rows=2, vision_only=name == "vision"))
    if name in DRAWN:
        return ControlNetStage(parts, corpus, latents, ControlNetRecipe(kind=name, rows=2))
    if name in LORAS:
        return LoraStage(parts, corpus, latents, replace(LORAS[name], rows=2))
    if name == "unet":
        return UnetStage(parts, corpus, latents, UnetRecipe(rows=2))
    return VaeStage(parts, corpus, None if name == "vae" else latents, VaeRecipe(rows=2))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in STEPS]
)
def test_a_whole_step_stays_on_the_networks_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", _plain_descent)
    corpus = draw_corpus(4, seed=0)
    latents = encode(corpus, load_parts(WEIGHTS), tmp_path)
    stage = _stage(name, load_parts(WEIGHTS, device=META), corpus, latents)

    # The loss as a number is what a step ends with; all before it has been done.
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        stage.step(0, 1.0)


def test_the_processor_computes_in_half_precision_where_it_can_and_shapes_do_not() -> None:
    one = torch.ones(2, 2)
    with half_precision(torch.device("cpu")):
        assert (one @ one).dtype is torch.bfloat16
    with half_precision(META):
        assert (one.to(META) @ one.to(META)).dtype is torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device here"):
        train("unet", Training(folder=tmp_path / "training", device="cuda"))

    assert not (tmp_path / "training").exists()
    assert pick_device("auto") == torch.device("cpu")
