"""The styles' renderings: the oracle reads them as it reads plain ones, and each can be told from the others."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from bottega.miniature.scenes import STYLES, held_out_scenes, random_layout, render
from bottega.quality import oracle
from load.miniature.quality import ssim

SCENES = held_out_scenes(20, things=1) + held_out_scenes(20, things=2)


@pytest.mark.parametrize("style", STYLES)
def test_every_word_of_a_scene_stays_true_in_a_style(style: str) -> None:
    rng = random.Random(0)

    read = [oracle.agrees(oracle.read(STYLES[style](random_layout(scene, rng))), scene) for scene in SCENES]

    assert sum(read) >= 0.97 * len(read)


@pytest.mark.parametrize("style", STYLES)
def test_a_style_looks_unlike_plain_scenes_and_other_styles(style: str) -> None:
    rng = random.Random(0)
    layouts = [random_layout(scene, rng) for scene in SCENES[::8]]
    pictures = [STYLES[style](layout) for layout in layouts]

    for other in (render, *(draw for name, draw in STYLES.items() if name != style)):
        assert mean(ssim(one, other(layout)) for one, layout in zip(pictures, layouts, strict=True)) < 0.97
