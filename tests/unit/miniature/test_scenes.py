"""The miniature's scenes: what is held out stays out, captions and control images show what is drawn, and where."""

from __future__ import annotations

import json
import random

import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest

from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import (
    COLOURS,
    Scene,
    SceneLayout,
    Thing,
    any_caption,
    caption,
    draw_edges,
    draw_layout,
    find_edges,
    held_out_scenes,
    random_layout,
    random_scene,
    render,
    training_scene,
)

STAR = Thing(shape="star", colour="red")


def test_what_is_held_out_never_changes() -> None:
    # Weights were trained without these: another split would make every figure about them worthless.
    assert [caption(scene) for scene in held_out_scenes(2, things=1)] == [
        "a small white square at the top on a cyan background",
        "a big white triangle on the left on a blue background",
    ]


def test_full_captions_of_held_out_scenes_are_in_no_training_caption() -> None:
    rng = random.Random(3)
    held_out = {caption(scene) for things in (1, 2) for scene in held_out_scenes(300, things=things)}

    trained = {any_caption(training_scene(rng, things=1 + count % 2), rng) for count in range(5_000)}

    assert not held_out & trained


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
        {"things": (STAR, STAR), "ground": "blue", "relation": "above"},
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


def layouts(count: int) -> list[SceneLayout]:
    rng = random.Random(7)
    return [random_layout(random_scene(rng, things=1 + number % 2), rng) for number in range(count)]


def levels(picture: PIL.Image.Image) -> npt.NDArray[np.int_]:
    return np.asarray(picture.convert("L")).astype(int)


def near(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """With all pixels next to it."""
    padded = np.pad(mask, 1)
    rows, columns = mask.shape
    moved = [padded[y : y + rows, x : x + columns] for y in range(3) for x in range(3)]
    grown: npt.NDArray[np.bool_] = np.logical_or.reduce(moved)
    return grown


def test_silhouettes_are_where_the_picture_differs_from_its_ground() -> None:
    for layout in layouts(20):
        pixels = np.asarray(render(layout)).astype(int)
        differs = np.abs(pixels - np.array(COLOURS[layout.ground])).max(axis=-1) > 0
        assert ((levels(draw_layout(layout)) > 0) == differs).mean() > 0.995


def test_edges_found_in_a_picture_are_those_that_are_drawn() -> None:
    for layout in layouts(20):
        found, drawn = levels(find_edges(render(layout))), levels(draw_edges(layout))
        assert (found[~near(drawn > 0)] == 0).all()
        assert (drawn[~near(found > 127)] > 127).sum() <= 2  # the tip of a heart has no pixel of its own


def test_edges_are_found_whatever_the_picture_is() -> None:
    photo = PIL.Image.new("RGBA", (500, 300), "navy")
    photo.paste(PIL.Image.new("RGBA", (250, 300), "white"), (0, 0))
    grey = PIL.Image.linear_gradient("L")

    assert levels(find_edges(photo)).max(axis=0).nonzero()[0].tolist() == [31]
    assert not levels(find_edges(grey)).any()
    assert find_edges(photo, 32).size == (32, 32)
