"""The miniature's scenes: what is held out stays out, captions say the scene, pictures are the same every time."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import (
    COLOURS,
    PLACES,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    any_caption,
    caption,
    held_out_scenes,
    random_layout,
    random_scene,
    training_scene,
)

STAR = Thing(shape="star", colour="red")
RING = Thing(shape="ring", colour="orange")
ONE = Scene(things=(STAR,), ground="blue", size="big", place="left")
TWO = Scene(things=(RING, STAR), ground="black", relation="left of")


def _all_of_one_thing() -> list[Scene]:
    return [
        Scene(things=(Thing(shape=shape, colour=colour),), ground=ground, size=size, place=place)
        for shape in SHAPES
        for colour in COLOURS
        for ground in COLOURS
        if ground != colour
        for size in SIZES
        for place in PLACES
    ]


def test_full_captions_say_everything() -> None:
    assert caption(ONE) == "a big red star on the left on a blue background"
    assert caption(TWO) == "an orange ring left of a red star on a black background"


def test_full_captions_are_distinct_for_all_scenes_of_one_thing() -> None:
    scenes = _all_of_one_thing()

    assert len({caption(scene) for scene in scenes}) == len(scenes) == 8 * 10 * 9 * 2 * 5


def test_a_tenth_of_the_scenes_is_held_out() -> None:
    scenes = _all_of_one_thing()

    assert 0.08 < sum(scene.held_out for scene in scenes) / len(scenes) < 0.12


def test_what_is_held_out_never_changes() -> None:
    # Weights were trained without these: another split would make every figure about them worthless.
    assert [caption(scene) for scene in held_out_scenes(2, things=1)] == [
        "a small white square at the top on a cyan background",
        "a big white triangle on the left on a blue background",
    ]


def test_full_captions_of_held_out_scenes_are_in_no_training_caption() -> None:
    rng = random.Random(3)
    held_out = {caption(scene) for things in (1, 2) for scene in held_out_scenes(300, things=things)}

    trained = {any_caption(training_scene(rng, things=1 + count % 2), rng) for count in range(20_000)}

    assert not held_out & trained


def test_a_scene_has_several_phrasings() -> None:
    rng = random.Random(0)

    assert len({any_caption(ONE, rng) for _ in range(300)}) >= 8
    assert len({any_caption(TWO, rng) for _ in range(300)}) >= 8


def test_every_word_of_a_caption_is_known_to_the_tokenizers_and_all_captions_fit() -> None:
    rng = random.Random(1)
    captions = [any_caption(random_scene(rng, things=1 + count % 2), rng) for count in range(3_000)]

    words = {word for text in captions for word in text.split()}
    for name in ("tokenizer", "tokenizer_2"):
        vocabulary = json.loads((WEIGHTS / name / "tokenizer.json").read_text())["model"]["vocab"]
        # "to" is the one word that takes two tokens.
        assert {word for word in words if word + "</w>" not in vocabulary} == {"to"}
    assert max(len(text.split()) for text in captions) <= 20


@pytest.mark.parametrize(
    "parts",
    [
        {"things": (STAR,), "ground": "red", "size": "big", "place": "left"},
        {"things": (STAR,), "ground": "blue", "size": "big", "place": ""},
        {"things": (STAR,), "ground": "blue", "size": "big", "place": "left", "relation": "above"},
        {"things": (STAR, STAR), "ground": "blue", "relation": "above"},
        {"things": (STAR, RING), "ground": "blue", "relation": "beside"},
        {"things": (Thing(shape="blob", colour="red"),), "ground": "blue", "size": "big", "place": "left"},
    ],
)
def test_parts_that_do_not_fit_are_no_scene(parts: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no scene"):
        Scene(**parts)  # type: ignore[arg-type]


def test_things_stand_apart_and_inside_the_picture() -> None:
    rng = random.Random(2)
    for count in range(2_000):
        scene = random_scene(rng, things=1 + count % 2)
        placed = random_layout(scene, rng).placed
        assert all(p.radius < p.x < 1 - p.radius and p.radius < p.y < 1 - p.radius for p in placed)
        if len(placed) == 2:
            gap = np.hypot(placed[0].x - placed[1].x, placed[0].y - placed[1].y) - sum(p.radius for p in placed)
            assert gap > 0.05
