"""What the training learns from: every style, latents that are kept, nothing of scenes that are held out."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import torch

from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import PLACES, STYLES, caption, held_out_scenes
from load.miniature.training.controlnet import ControlNetRecipe, ControlNetStage
from load.miniature.training.corpus import Corpus, draw_corpus, encode, with_styles
from load.miniature.training.parts import load_parts

HELD_OUT = {caption(scene) for things in (1, 2) for scene in held_out_scenes(600, things=things)}


def test_the_vae_learns_plain_pictures_and_every_style(corpus: Corpus) -> None:
    mixed = with_styles(corpus)

    assert torch.equal(mixed.images[::2], corpus.images[::2])
    for turn, row in enumerate(range(1, len(corpus), 2)):
        picture = STYLES[list(STYLES)[turn % len(STYLES)]](corpus.layouts[row])
        assert mixed.images[row].permute(1, 2, 0).numpy().tobytes() == picture.tobytes()


def test_latents_are_kept_for_the_next_run_of_the_same_pictures(corpus: Corpus, tmp_path: Path) -> None:
    parts = load_parts(WEIGHTS)
    first = encode(corpus, parts, tmp_path)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns

    again = encode(corpus, parts, tmp_path)

    assert file.stat().st_mtime_ns == written
    assert torch.equal(first.mean, again.mean)

    encode(draw_corpus(2, seed=2), parts, tmp_path)

    assert len(list(tmp_path.iterdir())) == 1, "those of other pictures take their place"


def test_near_misses_tell_nothing_of_held_out_scenes(corpus: Corpus) -> None:
    rng = random.Random(0)

    misses = {miss for _ in range(150) for miss in corpus.near_misses(torch.arange(len(corpus)), rng)}

    assert len(misses) > 500
    assert not HELD_OUT & misses


def test_half_of_a_controlnets_prompts_say_another_place_or_none(corpus: Corpus, tmp_path: Path) -> None:
    parts, many = load_parts(WEIGHTS), draw_corpus(1500, seed=3)
    stage = ControlNetStage(parts, many, encode(corpus, parts, tmp_path), ControlNetRecipe(kind="edges"))
    rng, said = random.Random(0), Counter[str]()

    for row, scene in enumerate(many.scenes):
        prompt = stage.prompt(row, rng)
        assert prompt not in HELD_OUT
        if scene.place:
            named = [place for place in PLACES if place in prompt.split()]
            said["none" if not named else "right" if named == [scene.place] else "wrong"] += 1

    # Of the phrasings of right and wrong prompts, one in ten leaves the place out.
    assert 0.27 < said["wrong"] / said.total() < 0.36
    assert 0.40 < said["right"] / said.total() < 0.50
