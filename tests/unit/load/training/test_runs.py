"""Runs of the miniature's training in its folder: the recipe, what is refused, and what a model survives."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline

from bottega.miniature import WEIGHTS
from load.miniature.training.lora import LORAS
from load.miniature.training.parts import NETWORKS, begin_model, load_parts, replace_model
from load.miniature.training.stages import RECIPE
from load.miniature.training.train import Outcome, Training, train_all


def _weights(model: Path) -> dict[str, str]:
    return {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in model.rglob("*.safetensors")}


@pytest.mark.slow
def test_the_recipe_leaves_a_model_that_the_stock_pipeline_draws_with(training: Training, tmp_path: Path) -> None:
    assert list(train_all(training)) == [Outcome(stage=name, steps=1) for name in RECIPE]
    model = shutil.copytree(training.folder / "model", tmp_path / "model")

    pipeline = StableDiffusionXLPipeline.from_pretrained(
        model, dtype=torch.float32, use_safetensors=True, add_watermarker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    (picture,) = pipeline("a red star", height=64, width=64, num_inference_steps=2).images

    assert picture.size == (64, 64)
    sizes = {file.relative_to(model).parts[0]: file.stat().st_size for file in model.glob("*/*.safetensors")}
    assert sizes.keys() == NETWORKS.keys()
    assert sum(sizes.values()) < 12e6
    assert sum(file.stat().st_size for file in model.glob("controlnets/*/*.safetensors")) < 7e6
    assert "_name_or_path" not in (model / "controlnets" / "edges" / "config.json").read_text()
    assert {folder.name for folder in (model / "loras").iterdir()} == set(RECIPE) & set(LORAS)
    assert sum(file.stat().st_size for file in (model / "loras").rglob("*") if file.is_file()) < 5e6


def test_a_model_survives_a_death_while_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "training"
    begin_model(folder, WEIGHTS, ("clip_vision",))
    before = _weights(folder / "model")
    parts = load_parts(folder / "model")

    def die(self: Path, target: Path) -> Path:
        if self.name == "model.part":
            raise KeyboardInterrupt
        return rename(self, target)

    rename = Path.rename
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            replace_model(parts, folder)

    begin_model(folder, WEIGHTS)

    assert _weights(folder / "model") == before
