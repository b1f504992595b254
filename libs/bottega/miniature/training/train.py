"""What `python -m bottega.miniature train` does: builds the corpus and the networks, runs one stage, keeps its outcome.

A training folder holds the state of every stage, the latents, and `model`: the whole model as trained so far.
"""

from __future__ import annotations

import math
import shutil
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

# Stages in their order, with the steps that each takes on two processor cores in a reasonable time.
STEPS = {"text": 800, "unet": 6000, "vae": 1500, "vision": 600}
CORPUS_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One run. folder: holds all that must outlive it. rows: of a batch, 0 is the stage's own choice.

    start: a model folder whose networks a new training begins with. fresh: begin this stage with random weights.
    encoder: the VAE's learns too.
    """

    stage: str
    folder: Path
    steps: int = 0
    minutes: float = math.inf
    pictures: int = 48_000
    rows: int = 0
    start: Path = WEIGHTS
    fresh: bool = False
    compiled: bool = False
    encoder: bool = False


def train(training: Training) -> int:
    """Runs the stage on from where it is, and writes the model; returns the steps taken in all."""
    torch.manual_seed(0)
    parts = _parts(training)
    corpus = draw_corpus(training.pictures, CORPUS_SEED)
    stage = _stage(training, parts, corpus)
    budget = Budget(steps=training.steps or STEPS[training.stage], minutes=training.minutes)
    step = run(stage, budget, training.folder)
    _keep(stage, parts, training.folder)
    return step


def export(folder: Path, stage: str, target: Path) -> int:
    """Writes the model with what the checkpoint of a running `stage` holds by now; returns its steps."""
    training = Training(stage=stage, folder=folder, pictures=1)
    parts = _parts(training)
    trained = _stage(training, parts, draw_corpus(1, CORPUS_SEED))
    step = resume(trained, folder)
    trained.finish()
    save_parts(parts, target)
    return step


def _parts(training: Training) -> Parts:
    kept = training.folder / "model"
    fresh = {"text": ("text_encoder", "text_encoder_2", "clip_vision"), "vision": ("clip_vision",)}
    again = fresh.get(training.stage, (training.stage,)) if training.fresh else ()
    if not kept.exists():
        shutil.copytree(training.start, kept)
    return load_parts(kept, fresh=again)


def _stage(training: Training, parts: Parts, corpus: Corpus) -> Stage:
    if training.stage in {"text", "vision"}:
        text = TextRecipe(vision_only=training.stage == "vision")
        return TextStage(parts, corpus, replace(text, rows=training.rows or text.rows))
    latents = encode(corpus, parts, training.folder)
    if training.stage == "vae":
        vae = VaeRecipe(encoder=training.encoder)
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
