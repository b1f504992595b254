"""The command `python -m load.miniature train`: builds the corpus and the networks, runs a stage or all, keeps it.

A training folder holds the checkpoint of every stage, the latents, and `model`: the whole model as trained so far.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bottega.errors import ConfigError
from bottega.miniature import WEIGHTS
from load.miniature.training.corpus import draw_corpus
from load.miniature.training.descent import pick_device
from load.miniature.training.loop import Budget, began_after, checkpoint_file, load_checkpoint, resume, run
from load.miniature.training.parts import NETWORKS, begin_model, load_parts, replace_model, save_parts
from load.miniature.training.stages import CHANGED, FRESH, RECIPE, STEPS, build_stage

CORPUS_SEED = 0
_EXPORT_PICTURES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How stages are run."""

    folder: Path
    """Holds all that must outlive a run."""
    steps: int = 0
    """Steps of a stage over all its runs; 0 is its own number."""
    minutes: float = math.inf
    """Minutes of this run, over all its stages."""
    pictures: int = 48_000
    rows: int = 0
    """Rows of a batch; 0 is the stage's own number."""
    start: Path = WEIGHTS
    """A model folder whose networks a new training begins with."""
    fresh: bool = False
    """Whether it begins with random weights instead."""
    compiled: bool = False
    device: str = "auto"
    """auto, cpu or cuda."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A stage's result."""

    stage: str
    steps: int
    """Steps of the stage over all its runs."""
    used_by: tuple[str, ...] = ()
    """Stages that began since and train on what it left.

    With any of them nothing was done: the stage's checkpoint is older than the model.
    """


def train_all(training: Training) -> Iterator[Outcome]:
    """Run the recipe on from where it is; yield each stage's outcome when it ends.

    A stage whose steps the minutes cut short is the last one: the others build on it.
    Raises ConfigError when the training cannot go on as asked.
    """
    ends = time.monotonic() + training.minutes * 60.0
    if training.fresh:
        _refuse_fresh_all(training.folder)
        begin_model(training.folder, training.start, tuple(NETWORKS))
    for name in RECIPE:
        left = max(ends - time.monotonic(), 0.0) / 60.0
        outcome = train(name, replace(training, minutes=left, fresh=False))
        yield outcome
        if outcome.steps < _steps(name, training):
            return


def train(name: str, training: Training) -> Outcome:
    """Run one stage on from where it is, and write the model. Raises ConfigError when it cannot go on as asked."""
    device = pick_device(training.device)
    if training.fresh:
        _refuse_fresh(name, training.folder)
    kept = load_checkpoint(name, training.folder)
    used_by = tuple(other for other in began_after(name, training.folder) if set(CHANGED[name]) & set(CHANGED[other]))
    if kept and used_by:
        if kept.step < _steps(name, training):
            raise ConfigError(_stale(name, kept.step, used_by, training.folder))
        return Outcome(stage=name, steps=kept.step, used_by=used_by)
    begin_model(training.folder, training.start, FRESH[name] if training.fresh else ())
    torch.manual_seed(0)
    parts = load_parts(training.folder / "model", device=device)
    corpus = draw_corpus(training.pictures, CORPUS_SEED)
    stage = build_stage(name, parts, corpus, training.folder, rows=training.rows, compiled=training.compiled)
    step = run(stage, Budget(steps=_steps(name, training), minutes=training.minutes), training.folder)
    stage.finish()
    replace_model(parts, training.folder)
    return Outcome(stage=name, steps=step)


def export(name: str, folder: Path, target: Path) -> int:
    """Write the model with what the checkpoint of a running stage holds by now; return its steps.

    Raises ConfigError when there is no checkpoint.
    """
    if not checkpoint_file(name, folder).exists():
        raise ConfigError(f"{checkpoint_file(name, folder)} is not there: nothing of {name} to export yet")
    parts = load_parts(folder / "model")
    with tempfile.TemporaryDirectory() as scratch:  # the running stage's latents stay as they are
        stage = build_stage(name, parts, draw_corpus(_EXPORT_PICTURES, CORPUS_SEED), Path(scratch))
    kept = resume(stage, folder)
    stage.finish()
    save_parts(parts, target)
    return kept.step if kept else 0


def _steps(name: str, training: Training) -> int:
    return training.steps or STEPS[name]


def _refuse_fresh_all(folder: Path) -> None:
    """Raise ConfigError where a training has begun."""
    if (folder / "model").exists() or any(folder.glob("*.pt")):
        raise ConfigError(
            f"{folder} holds a training. Give another --folder, or remove this one, to begin one with random weights;\n"
            "without --fresh it goes on."
        )


def _refuse_fresh(name: str, folder: Path) -> None:
    """Raise ConfigError where random weights would not be used, or be of no use."""
    if name not in FRESH:
        raise ConfigError(f"--fresh: {name} cannot begin with random weights; of {', '.join(FRESH)} each can")
    file = checkpoint_file(name, folder)
    if file.exists():
        raise ConfigError(
            f"{file} is there. Remove it to begin {name} with random weights; without --fresh it goes on."
        )


def _stale(name: str, step: int, used_by: tuple[str, ...], folder: Path) -> str:
    return (
        f"{name} stopped after {step} steps, and {', '.join(used_by)} trained on what it left: going on undoes that.\n"
        f"Remove {checkpoint_file(name, folder)} to train {name} anew from the model as it is now."
    )
