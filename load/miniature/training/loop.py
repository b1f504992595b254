"""Runs a stage of the training: steps, a progress bar, checkpoints by time, and going on where the last run ended."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from load.miniature.training.checkpoints import Checkpoint, load_checkpoint, next_number, save_checkpoint

CHECKPOINT_S = 60.0


class Stage(Protocol):
    """One part of the training. A step is determined by the state and its number, so a resumed run repeats it."""

    name: str

    def step(self, number: int, rate: float) -> float:
        """Takes optimizer step `number` (from 0) at `rate` times the stage's learning rates; returns the loss."""
        ...

    def finish(self) -> None:
        """Leaves the networks as they shall be kept; no step follows."""
        ...

    def state(self) -> dict[str, Any]:
        """All that the next step depends on: tensors, numbers, and lists and dicts of them."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """steps: of the whole stage, over all its runs. minutes: of this run."""

    steps: int
    minutes: float = math.inf


def run(stage: Stage, budget: Budget, folder: Path) -> int:
    """Trains until the stage's steps or this run's minutes are used up; returns the number of steps taken in all.

    folder: of the checkpoint; one that is there is gone on from.
    """
    kept = resume(stage, folder)
    began, number = (kept.step, kept.number) if kept else (0, next_number(folder))
    ends = saved = time.monotonic()
    ends += budget.minutes * 60.0
    step, mean = began, 0.0
    with tqdm(total=budget.steps, initial=began, desc=stage.name, mininterval=1.0, smoothing=0.05) as bar:
        while step < budget.steps and time.monotonic() < ends:
            loss = stage.step(step, rate(step, budget.steps))
            step += 1
            mean = loss if step == began + 1 else mean + 0.02 * (loss - mean)
            bar.set_postfix(loss=f"{mean:.4f}", refresh=False)
            bar.update()
            if time.monotonic() - saved > CHECKPOINT_S:
                save_checkpoint(Checkpoint(step=step, number=number, state=stage.state()), stage.name, folder)
                saved = time.monotonic()
    save_checkpoint(Checkpoint(step=step, number=number, state=stage.state()), stage.name, folder)
    return step


def resume(stage: Stage, folder: Path) -> Checkpoint | None:
    """Puts the stage where its checkpoint in `folder`, if there is one, left it."""
    kept = load_checkpoint(stage.name, folder)
    if kept:
        stage.load_state(kept.state)
    return kept


def rate(step: int, steps: int) -> float:
    """Of the full learning rate: up within 50 steps, then down along a cosine to a fiftieth."""
    warm = min((step + 1) / 50, 1.0)
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
