"""What the training learns from: every style, latents that are kept, nothing of scenes that are held out."""

from __future__ import annotations

import random

import torch

from bottega.miniature.scenes import STYLES, caption, held_out_scenes
from load.miniature.training.corpus import Corpus, with_styles


def test_the_vae_learns_plain_pictures_and_every_style(corpus: Corpus) -> None:
    mixed = with_styles(corpus)

    assert torch.equal(mixed.images[::2], corpus.images[::2])
    for turn, row in enumerate(range(1, len(corpus), 2)):
        picture = STYLES[list(STYLES)[turn % len(STYLES)]](corpus.layouts[row])
        assert mixed.images[row].permute(1, 2, 0).numpy().tobytes() == picture.tobytes()


def test_near_misses_tell_nothing_of_held_out_scenes(corpus: Corpus) -> None:
    held_out = {caption(scene) for things in (1, 2) for scene in held_out_scenes(600, things=things)}
    rng = random.Random(0)

    misses = {miss for _ in range(150) for miss in corpus.near_misses(torch.arange(len(corpus)), rng)}

    assert len(misses) > 500
    assert not held_out & misses
