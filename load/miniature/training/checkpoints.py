"""The checkpoints of a training folder: what each stage goes on from, and which stages began after which."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """step: steps taken until then. number: of the stage, as they are counted when they begin. state: the stage's."""

    step: int
    number: int
    state: dict[str, Any]


def checkpoint_file(name: str, folder: Path) -> Path:
    """Where the stage of that name keeps its checkpoint; without the file, the stage begins anew."""
    return folder / f"{name}.pt"


def load_checkpoint(name: str, folder: Path) -> Checkpoint | None:
    """The stage's, or None."""
    file = checkpoint_file(name, folder)
    return _read(file) if file.exists() else None


def save_checkpoint(checkpoint: Checkpoint, name: str, folder: Path) -> None:
    """Whole or not at all, also when the power goes."""
    folder.mkdir(parents=True, exist_ok=True)
    file = checkpoint_file(name, folder)
    part = file.with_suffix(".part")
    torch.save({"step": checkpoint.step, "number": checkpoint.number, "stage": checkpoint.state}, part)
    part.replace(file)


def next_number(folder: Path) -> int:
    """Of a stage that begins now."""
    return max(_numbers(folder).values(), default=0) + 1


def began_after(name: str, folder: Path) -> tuple[str, ...]:
    """Names of the stages that began after this one, in their order; none after one without a checkpoint."""
    numbers = _numbers(folder)
    if name not in numbers:
        return ()
    return tuple(sorted((other for other in numbers if numbers[other] > numbers[name]), key=numbers.__getitem__))


def _numbers(folder: Path) -> dict[str, int]:
    return {file.stem: _read(file, mmap=True).number for file in folder.glob("*.pt")}


def _read(file: Path, *, mmap: bool = False) -> Checkpoint:
    """mmap: reads no tensor before it is looked at."""
    kept = torch.load(file, weights_only=True, mmap=mmap, map_location="cpu")
    return Checkpoint(step=kept["step"], number=kept["number"], state=kept["stage"])
