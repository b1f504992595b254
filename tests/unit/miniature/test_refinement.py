"""Scenes go on in small changes, and the sentences that say all of a scene are read back."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from bottega.miniature.scenes import Scene, Thing, caption, placed_caption, random_scene, read_caption, refine

STAR = Thing(shape="star", colour="red")
ONE = Scene(things=(STAR,), ground="blue", size="big", place="left")
TWO = Scene(things=(Thing(shape="ring", colour="green"), STAR), ground="white", relation="above")


def _parts(scene: Scene) -> dict[str, str]:
    things = {
        f"{name} {at}": getattr(each, name) for at, each in enumerate(scene.things) for name in ("shape", "colour")
    }
    return {**things, "ground": scene.ground, "size": scene.size, "place": scene.place, "relation": scene.relation}


@pytest.mark.parametrize("scene", [ONE, TWO])
def test_a_refinement_changes_one_part_and_each_of_them_about_as_often(scene: Scene) -> None:
    rng = random.Random(0)
    changed: Counter[str] = Counter()
    for _ in range(400):
        before, after = _parts(scene), _parts(refine(scene, rng))
        (part,) = [name for name in before if before[name] != after[name]]
        changed[part] += 1

    assert set(changed) == {name for name, value in _parts(scene).items() if value}
    assert min(changed.values()) > 0.5 * max(changed.values())


@pytest.mark.parametrize("things", [1, 2])
def test_captions_are_read_back(things: int) -> None:
    rng = random.Random(things)
    for _ in range(200):
        scene = random_scene(rng, things=things)

        assert read_caption(caption(scene)) == scene
        assert read_caption(placed_caption(scene)) == scene


@pytest.mark.parametrize(
    "text",
    [
        "a red star",
        "a big red star on the left on a red background",  # unseen on its ground
        "a big red star at the left on a blue background",  # no words of the grammar's
        "a red star above a red star on a blue background",  # one thing twice
        "a dog on the moon",
    ],
)
def test_other_texts_are_no_scene(text: str) -> None:
    assert read_caption(text) is None
