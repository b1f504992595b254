"""The command `python -m load.miniature train`: builds the corpus and the networks, runs a stage or all, keeps it.

A training folder holds the checkpoint of every stage, the latents, and `model`: the whole model as trained so far; and
where looks were asked for, what is drawn by now: pictures of held-out prompts, read by the oracle, and their sheet.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from threading import Event
from typing import Any

import torch

from bottega.errors import ConfigError
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import caption, held_out_scenes
from load.bench.miniature import Drawn, draw_stock, write_sheet
from load.bench.stock import stock_pipeline
from load.miniature.training.corpus import draw_corpus
from load.miniature.training.descent import DescentStage, pick_device
from load.miniature.training.dit import dit_start
from load.miniature.training.loop import Budget, Looks, began_after, checkpoint_file, load_checkpoint, resume, run
from load.miniature.training.parts import (
    NETWORKS,
    Parts,
    begin_model,
    load_parts,
    networks_of,
    replace_model,
    save_parts,
)
from load.miniature.training.stages import CHANGED, DIT_RECIPE, FRESH, RECIPE, STEPS, build_stage

CORPUS_SEED = 0
_EXPORT_PICTURES = 512
PROGRESS, SHEET = "progress.jsonl", "look.png"
"""The files in a training's folder: a line for each look, and the pictures of the last one."""
# Pictures of one thing, and of two; and of a row of the sheet.
_EACH, _COLUMNS = 32, 8


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
    look_every: int = 0
    """Steps between two looks at what is drawn by now; 0 for none."""
    stopped: Event = field(default_factory=Event)
    """Ends the run after the step in which it is set; the next one goes on."""


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
    _begin(name, training)
    torch.manual_seed(0)
    parts = load_parts(training.folder / "model", device=device)
    corpus = draw_corpus(training.pictures, CORPUS_SEED)
    stage = build_stage(name, parts, corpus, training.folder, rows=training.rows, compiled=training.compiled)
    every = training.look_every
    looks = Looks(every=every, look=_looker(stage, parts, training.folder)) if every else None
    budget = Budget(steps=_steps(name, training), minutes=training.minutes, stopped=training.stopped)
    step = run(stage, budget, training.folder, looks)
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


def _begin(name: str, training: Training) -> None:
    """Make the training folder's model if there is none yet. Raise ConfigError if it is not of the stage's kind."""
    model = training.folder / "model"
    with tempfile.TemporaryDirectory() as scratch:
        start = training.start
        if name in DIT_RECIPE and not model.exists():
            start = dit_start(start, Path(scratch))
        begin_model(training.folder, start, FRESH[name] if training.fresh else ())
    needed = "transformer" if name in DIT_RECIPE else "unet"
    if needed not in networks_of(model):
        raise ConfigError(f"{model} has no {needed}, which {name} needs; give another --folder")


def _looker(stage: DescentStage, parts: Parts, folder: Path) -> Callable[[int, float], None]:
    """Return a function of steps and loss that draws with the averaged weights and writes `PROGRESS` and `SHEET`.

    Args:
        stage: What is trained.
        parts: The networks, which the stage changes.
        folder: The training's.
    """
    groups = {"one_object": held_out_scenes(_EACH, things=1), "two_objects": held_out_scenes(_EACH, things=2)}
    scenes = [scene for group in groups.values() for scene in group]

    def look(step: int, loss: float) -> None:
        with stage.averaged():
            pictures = draw_stock(_pipeline(parts), [caption(scene) for scene in scenes], **stage.draw_options)
        drawn = [Drawn(scene=scene, picture=picture) for scene, picture in zip(scenes, pictures, strict=True)]
        right = {name: mean(one.right for one in drawn if one.scene in group) for name, group in groups.items()}
        write_sheet(drawn, _COLUMNS, folder / SHEET)
        with (folder / PROGRESS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": stage.name, "step": step, "loss": round(loss, 4), **right}) + "\n")

    return look


def _pipeline(parts: Parts) -> Any:
    """Return the stock pipeline of a model with these networks."""
    index = json.loads((parts.folder / "model_index.json").read_text(encoding="utf-8"))
    return stock_pipeline(parts.folder, **{name: net for name, net in parts.networks.items() if name in index})


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
