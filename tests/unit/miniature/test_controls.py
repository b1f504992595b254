"""Control images show where the things of a scene are, drawn or found; elsewhere is the same in other places."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import PIL.Image

from bottega.miniature.scenes import (
    COLOURS,
    Scene,
    SceneLayout,
    Thing,
    caption,
    draw_edges,
    draw_layout,
    elsewhere,
    find_edges,
    random_layout,
    random_scene,
    render,
    unplaced_caption,
)

STAR = Thing(shape="star", colour="red")
RING = Thing(shape="ring", colour="orange")
ONE = Scene(things=(STAR,), ground="blue", size="big", place="left")
TWO = Scene(things=(RING, STAR), ground="black", relation="left of")


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


def test_elsewhere_a_scene_shows_the_same_in_other_places() -> None:
    assert {other.place for other in elsewhere(ONE)} == {"right", "top", "bottom", "center"}
    assert {(other.things[0].shape, other.relation) for other in elsewhere(TWO)} == {
        ("ring", "above"),
        ("star", "left of"),
    }
    rng = random.Random(1)
    for count in range(200):
        scene = random_scene(rng, things=1 + count % 2)
        others = elsewhere(scene)
        assert scene not in others
        for other in others:
            assert set(other.things) == set(scene.things)
            assert (other.ground, other.size) == (scene.ground, scene.size)
            assert caption(other) != caption(scene)


def test_of_two_things_of_one_shape_an_outline_does_not_tell_which_is_which() -> None:
    blue = Thing(shape="star", colour="blue")

    assert [other.relation for other in elsewhere(Scene(things=(STAR, blue), ground="white", relation="above"))] == [
        "left of"
    ]


def test_an_unplaced_caption_says_all_but_the_place() -> None:
    assert unplaced_caption(ONE) == "a big red star on a blue background"
    assert unplaced_caption(TWO) == "an orange ring and a red star on a black background"
