"""The run of a stage: steps, a progress bar, checkpoints by time, and going on where the last run ended.

The checkpoints of a training folder also tell which stages began after which.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import torch
from tqdm import tqdm

CHECKPOINT_S = 60.0


class Stage(Protocol):
    """A part of the training. A step is determined by the state and its number, so a resumed run repeats it."""

    name: str

    def step(self, number: int, rate: float) -> float:
        """Take optimizer step `number` (from 0) at `rate` times the stage's learning rates; return the loss."""
        ...

    def finish(self) -> None:
        """Leave the networks as they shall be kept; no step follows."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all that the next step depends on: tensors, numbers, and lists and dicts of them."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Take a state over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a run."""

    steps: int
    """Steps of the whole stage, over all its runs."""
    minutes: float = math.inf
    """Minutes of this run."""
    stopped: Event = field(default_factory=Event)
    """Ends the run after the step in which it is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Looks at what a stage has learned, now and then."""

    every: int
    """Steps between two looks."""
    look: Callable[[int, float], None]
    """Called with the number of steps taken and the mean loss of the last ones, between two steps."""


def run(stage: Stage, budget: Budget, folder: Path, looks: Looks | None = None) -> int:
    """Train until the stage's steps or this run's minutes are used up; return the number of steps taken in all.

    Args:
        stage: The stage.
        budget: Its limits.
        folder: Of the checkpoint, from which the run goes on.
        looks: What is done between steps.
    """
    kept = resume(stage, folder)
    began, number = (kept.step, kept.number) if kept else (0, next_number(folder))
    ends = saved = time.monotonic()
    ends += budget.minutes * 60.0
    step, mean = began, 0.0
    with tqdm(total=budget.steps, initial=began, desc=stage.name, mininterval=1.0, smoothing=0.05) as bar:
        while step < budget.steps and time.monotonic() < ends and not budget.stopped.is_set():
            loss = stage.step(step, rate(step, budget.steps))
            step += 1
            mean = loss if step == began + 1 else mean + 0.02 * (loss - mean)
            bar.set_postfix(loss=f"{mean:.4f}", refresh=False)
            bar.update()
            if looks is not None and step % looks.every == 0:
                looks.look(step, mean)
            if time.monotonic() - saved > CHECKPOINT_S:
                save_checkpoint(Checkpoint(step=step, number=number, state=stage.state()), stage.name, folder)
                saved = time.monotonic()
    save_checkpoint(Checkpoint(step=step, number=number, state=stage.state()), stage.name, folder)
    return step


def resume(stage: Stage, folder: Path) -> Checkpoint | None:
    """Put the stage where its checkpoint in `folder`, if there is one, left it."""
    kept = load_checkpoint(stage.name, folder)
    if kept:
        stage.load_state(kept.state)
    return kept


def rate(step: int, steps: int) -> float:
    """Return the share of the full learning rate: up within 50 steps, then down along a cosine to a fiftieth."""
    warm = min((step + 1) / 50, 1.0)
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A stage between two steps."""

    step: int
    """Steps taken until then."""
    number: int
    """Number of the stage, in the order in which they began."""
    state: dict[str, Any]
    """The stage's."""


def checkpoint_file(name: str, folder: Path) -> Path:
    """Return the file of a stage's checkpoint; without the file, the stage begins anew."""
    return folder / f"{name}.pt"


def load_checkpoint(name: str, folder: Path) -> Checkpoint | None:
    """Return the stage's checkpoint, or None."""
    file = checkpoint_file(name, folder)
    return _read(file) if file.exists() else None


def save_checkpoint(checkpoint: Checkpoint, name: str, folder: Path) -> None:
    """Write a checkpoint whole or not at all, also when the power goes."""
    folder.mkdir(parents=True, exist_ok=True)
    file = checkpoint_file(name, folder)
    part = file.with_suffix(".part")
    torch.save({"step": checkpoint.step, "number": checkpoint.number, "stage": checkpoint.state}, part)
    part.replace(file)


def next_number(folder: Path) -> int:
    """Return the number of a stage that begins now."""
    return max(_numbers(folder).values(), default=0) + 1


def began_after(name: str, folder: Path) -> tuple[str, ...]:
    """Return the stages that began after this one, in their order; none after one without a checkpoint."""
    numbers = _numbers(folder)
    if name not in numbers:
        return ()
    return tuple(sorted((other for other in numbers if numbers[other] > numbers[name]), key=numbers.__getitem__))


def _numbers(folder: Path) -> dict[str, int]:
    return {file.stem: _read(file, mmap=True).number for file in folder.glob("*.pt")}


def _read(file: Path, *, mmap: bool = False) -> Checkpoint:
    """Read a checkpoint.

    Args:
        file: Its file.
        mmap: Whether tensors are read only when they are used.
    """
    kept = torch.load(file, weights_only=True, mmap=mmap, map_location="cpu")
    return Checkpoint(step=kept["step"], number=kept["number"], state=kept["stage"])
