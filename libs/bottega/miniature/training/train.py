"""What `python -m bottega.miniature train` does: builds the corpus and the networks, runs a stage or all, keeps it.

A training folder holds the state of every stage, the latents, and `model`: the whole model as trained so far.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bottega.miniature import WEIGHTS
from bottega.miniature.training.corpus import Corpus, draw_corpus, encode
from bottega.miniature.training.loop import Budget, Stage, resume, run
from bottega.miniature.training.parts import Parts, load_parts, save_parts
from bottega.miniature.training.text import TextRecipe, TextStage
from bottega.miniature.training.unet import UnetRecipe, UnetStage
from bottega.miniature.training.vae import VaeRecipe, VaeStage

# The stages of a whole training in their order, with their steps: as many in all as the embedded weights had. The VAE
# is first, because the UNet learns its latents; vision is last, because the UNet's stage trains the text encoders on.
RECIPE = {"vae": 4500, "text": 500, "unet": 3800, "vision": 600}
# A decoder alone is for later: it sharpens, and all that was trained on the latents stays as it is.
STEPS = {**RECIPE, "decoder": 1500}
CORPUS_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How stages are run. folder: holds all that must outlive a run. steps: of a stage over all its runs, and
    rows: of a batch; 0 is the stage's own choice. minutes: of this run, over all its stages.

    start: a model folder whose networks a new training begins with. fresh: begin the stage with random weights.
    """

    folder: Path
    steps: int = 0
    minutes: float = math.inf
    pictures: int = 48_000
    rows: int = 0
    start: Path = WEIGHTS
    fresh: bool = False
    compiled: bool = False


def train_all(training: Training) -> Iterator[tuple[str, int]]:
    """Runs the recipe on from where it is; yields each stage with its steps taken in all, when they are done.

    A stage whose steps the minutes cut short is the last one: the others build on it.
    """
    ends = time.monotonic() + training.minutes * 60.0
    for name in RECIPE:
        left = max(ends - time.monotonic(), 0.0) / 60.0
        step = train(name, replace(training, minutes=left))
        yield name, step
        if step < (training.steps or STEPS[name]):
            return


def train(name: str, training: Training) -> int:
    """Runs one stage on from where it is, and writes the model; returns the steps taken in all."""
    torch.manual_seed(0)
    parts = _parts(name, training)
    corpus = draw_corpus(training.pictures, CORPUS_SEED)
    stage = _stage(name, training, parts, corpus)
    budget = Budget(steps=training.steps or STEPS[name], minutes=training.minutes)
    step = run(stage, budget, training.folder)
    _keep(stage, parts, training.folder)
    return step


def export(name: str, folder: Path, target: Path) -> int:
    """Writes the model with what the checkpoint of a running stage holds by now; returns its steps."""
    training = Training(folder=folder, pictures=1)
    parts = _parts(name, training)
    stage = _stage(name, training, parts, draw_corpus(1, CORPUS_SEED))
    step = resume(stage, folder)
    stage.finish()
    save_parts(parts, target)
    return step


def _parts(name: str, training: Training) -> Parts:
    kept = training.folder / "model"
    fresh = {"text": ("text_encoder", "text_encoder_2", "clip_vision"), "vision": ("clip_vision",)}
    again = fresh.get(name, (name,)) if training.fresh else ()
    if not kept.exists():
        shutil.copytree(training.start, kept)
    return load_parts(kept, fresh=again)


def _stage(name: str, training: Training, parts: Parts, corpus: Corpus) -> Stage:
    if name in {"text", "vision"}:
        text = TextRecipe(vision_only=name == "vision")
        return TextStage(parts, corpus, replace(text, rows=training.rows or text.rows))
    latents = encode(corpus, parts, training.folder)
    if name in {"vae", "decoder"}:
        vae = VaeRecipe(decoder_only=name == "decoder")
        return VaeStage(parts, corpus, latents, replace(vae, rows=training.rows or vae.rows))
    unet = UnetRecipe(compiled=training.compiled)
    return UnetStage(parts, corpus, latents, replace(unet, rows=training.rows or unet.rows))


def _keep(stage: Stage, parts: Parts, folder: Path) -> None:
    """Replaces the folder's model as a whole."""
    stage.finish()
    part = folder / "model.part"
    shutil.rmtree(part, ignore_errors=True)
    save_parts(parts, part)
    shutil.rmtree(folder / "model", ignore_errors=True)
    part.rename(folder / "model")
