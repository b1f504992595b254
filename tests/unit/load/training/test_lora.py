"""A trained LoRA touches what its recipe says, and is saved in the forms that people have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from bottega.miniature import WEIGHTS
from load import stock_loras
from load.miniature.training.corpus import draw_corpus
from load.miniature.training.lora import LORAS, LoraFiles, LoraStage, lora_folder
from load.miniature.training.parts import Parts, load_parts, save_parts
from load.miniature.training.stages import build_stage
from tests.support.stock import load_stock

PICTURES = 16


def new_stage(style: str, tmp_path: Path) -> tuple[LoraStage, Parts]:
    parts = load_parts(WEIGHTS)
    stage = build_stage(style, parts, draw_corpus(PICTURES, seed=1), tmp_path)
    assert isinstance(stage, LoraStage)
    return stage, parts


@pytest.mark.parametrize(
    "style", [pytest.param(style, marks=[] if style == "dusk" else [pytest.mark.slow]) for style in LORAS]
)
def test_a_lora_touches_what_it_says_and_nothing_else(style: str, tmp_path: Path) -> None:
    _, parts = new_stage(style, tmp_path)

    save_parts(replace(parts, networks={}), tmp_path / "model")

    pipeline = load_stock()
    folder = tmp_path / "model" / lora_folder(style)
    touched = {name.rsplit(".lora_", 1)[0] for name in stock_loras.load_layers(folder, pipeline)}
    said = {
        f"{network}.{path}"
        for network, reach in LORAS[style].reach.items()
        for path, _ in getattr(pipeline, network).named_modules()
        if path.endswith(tuple(f".{end}" for end in reach)) or path in reach
    }
    assert touched == said


def test_kohyas_form_means_what_was_trained(tmp_path: Path, told: dict[str, Any]) -> None:
    """Mixed alphas, text encoders and convolutions: against the trained networks themselves."""
    stage, parts = new_stage("dusk", tmp_path)
    state, generator = stage.state(), torch.Generator().manual_seed(0)
    for kept in state["average"]:  # weights that change something, as if it had learned
        kept.copy_(0.05 * torch.randn(kept.shape, generator=generator))
    stage.load_state(state)
    stage.finish()
    save_parts(replace(parts, networks={}), tmp_path / "model")
    folder = tmp_path / "model" / "loras" / "dusk"
    pipeline = load_stock()
    stock_loras.load(pipeline, folder, "dusk")

    with safe_open(folder / "dusk.safetensors", "pt") as file:
        alphas = {float(file.get_tensor(name)) for name in file.keys() if name.endswith(".alpha")}  # noqa: SIM118
    assert len(alphas) > 3
    files = parts.loras[lora_folder("dusk")]
    assert isinstance(files, LoraFiles)
    nets = files.networks
    ids = parts.tokens(["a big red star"])
    with torch.no_grad():
        torch.testing.assert_close(pipeline.unet(**told).sample, nets["unet"](**told).sample, atol=2e-3, rtol=2e-3)
        for name in ("text_encoder", "text_encoder_2"):
            found = getattr(pipeline, name)(ids).last_hidden_state
            torch.testing.assert_close(found, nets[name](ids).last_hidden_state, atol=2e-3, rtol=2e-3)
            assert not torch.allclose(found, parts[name](ids).last_hidden_state, atol=1e-2)
