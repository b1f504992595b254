"""The model in a training folder: made when a training begins, and replaced as a whole when a stage ends."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from load.miniature.training.parts import Parts, load_parts, save_parts

_SEED = 0


def begin_model(folder: Path, start: Path, fresh: tuple[str, ...] = ()) -> None:
    """Makes the folder's model, from that of the folder `start` where there is none yet.

    fresh: names of networks that get random weights.
    """
    model, old = folder / "model", folder / "model.old"
    if not model.exists() and old.exists():  # the power went while it was replaced
        old.rename(model)
    if fresh or not model.exists():
        torch.manual_seed(_SEED)
        replace_model(load_parts(model if model.exists() else start, fresh=fresh), folder)


def replace_model(parts: Parts, folder: Path) -> None:
    """At every moment the old or the new one is there whole."""
    model, part, old = (folder / name for name in ("model", "model.part", "model.old"))
    shutil.rmtree(part, ignore_errors=True)
    save_parts(parts, part)
    shutil.rmtree(old, ignore_errors=True)
    if model.exists():
        model.rename(old)
    part.rename(model)
    shutil.rmtree(old, ignore_errors=True)
