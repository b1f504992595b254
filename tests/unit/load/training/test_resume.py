"""Training that is killed or stopped and gone on with leaves, to the bit, what it would have left in one go."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from load.miniature.training import loop
from load.miniature.training.loop import Checkpoint, load_checkpoint, save_checkpoint
from load.miniature.training.stages import STEPS
from load.miniature.training.train import Training, train


class Watch:
    """Stands in for the module `time`: a minute passes whenever somebody looks."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 60.0
        return self._now


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_stage_that_was_stopped_and_killed_goes_on_to_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, it has finished: its averaged weights are the folder's model. Killed, it has not."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    with monkeypatch.context() as stopped:
        stopped.setattr(loop, "time", Watch())
        assert train(name, _training(parted, minutes=2.5)).steps == 1
    with monkeypatch.context() as killed:
        killed.setattr(loop, "CHECKPOINT_S", -1.0)
        killed.setattr(loop, "save_checkpoint", _save_and_die)
        with pytest.raises(KeyboardInterrupt):
            train(name, _training(parted))
    checkpoint = load_checkpoint(name, parted)
    assert checkpoint
    assert checkpoint.step == 2

    assert train(name, _training(parted)).steps == train(name, _training(whole)).steps == 4

    assert _digests(parted / "model") == _digests(whole / "model")
    left, kept = (load_checkpoint(name, folder) for folder in (parted, whole))
    assert left
    assert kept
    assert (left.step, _tensors(left.state)) == (kept.step, _tensors(kept.state))


def _save_and_die(checkpoint: Checkpoint, name: str, folder: Path) -> None:
    save_checkpoint(checkpoint, name, folder)
    raise KeyboardInterrupt


def _training(folder: Path, minutes: float = 60.0) -> Training:
    return Training(folder=folder, steps=4, rows=2, pictures=4, minutes=minutes)


def _digests(folder: Path) -> dict[str, str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _tensors(state: Any) -> list[str]:
    """Digests of all tensors in it, in their order."""
    if isinstance(state, torch.Tensor):
        return [hashlib.sha256(state.numpy().tobytes()).hexdigest()]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [digest for part in parts for digest in _tensors(part)]
