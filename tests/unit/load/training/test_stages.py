"""Stages of the miniature's training: each learns, on the device that it is told, and leaves the rest as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bottega.errors import ConfigError
from bottega.miniature import WEIGHTS
from load.miniature.training.corpus import Corpus
from load.miniature.training.descent import pick_device
from load.miniature.training.dit import dit_start
from load.miniature.training.parts import Parts, load_parts
from load.miniature.training.stages import CHANGED, DIT_RECIPE, FRESH, build_stage
from load.miniature.training.train import Training, train
from tests.unit.load.training.conftest import every_stage

STEPS = 20


def _worn(name: str, folder: Path) -> Parts:
    """Networks with something to learn for a stage: fresh ones, a worn decoder."""
    torch.manual_seed(0)
    start = dit_start(WEIGHTS, folder / "start") if name in DIT_RECIPE else WEIGHTS
    parts = load_parts(start, fresh=tuple(set(FRESH.get(name, ())) - {"vae"}))
    with torch.no_grad():
        for parameter in parts["vae"].decoder.parameters() if name in {"vae", "decoder"} else ():
            parameter.mul_(1.0 + 0.1 * torch.randn_like(parameter))
        for parameter in parts["transformer"].parameters() if name in {"dit-layout", "dit-striped"} else ():
            parameter.normal_(std=0.1)  # a fresh one predicts zeros, whatever comes in
    return parts


def _weights(parts: Parts) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": kept.clone() for name, net in parts.networks.items() for key, kept in net.state_dict().items()
    }


@pytest.mark.parametrize("name", every_stage({"vision"}))
def test_a_stage_learns_and_changes_nothing_else(name: str, corpus: Corpus, tmp_path: Path) -> None:
    parts = _worn(name, tmp_path)
    before = _weights(parts)
    stage = build_stage(name, parts, corpus, tmp_path, rows=4)

    losses = [stage.step(0, 1.0) for _ in range(STEPS)]  # one batch, again and again: what there is to learn is in it
    stage.finish()

    assert losses[-1] < 0.95 * losses[0]
    after = _weights(parts)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    learns = ("vae.decoder", "vae.post_quant_conv") if name == "decoder" else CHANGED[name]
    assert not [key for key in changed if not key.startswith(learns)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device here"):
        train("unet", Training(folder=tmp_path / "training", device="cuda"))

    assert not (tmp_path / "training").exists()
    assert pick_device("auto") == torch.device("cpu")
