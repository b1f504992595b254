"""Refinements of a scene as users make them: one small change after another, each part equally likely."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from bottega.miniature.scenes.grammar import COLOURS, PLACES, RELATIONS, SHAPES, SIZES, Scene, Thing


def refine(scene: Scene, rng: random.Random) -> Scene:
    """Return a scene that differs in one part: a shape, a colour, the ground, the place or relation, or the size."""
    parts = [(name, at) for at in range(len(scene.things)) for name in ("shape", "colour")]
    parts += [(name, 0) for name in (("ground", "relation") if scene.relation else ("ground", "size", "place"))]
    while True:
        try:
            return _changed(scene, *rng.choice(parts), rng)
        except ValueError:  # a thing of the ground's colour, or the same thing twice
            continue


def _changed(scene: Scene, part: str, at: int, rng: random.Random) -> Scene:
    thing = scene.things[at]
    match part:
        case "shape":
            return _with(scene, at, replace(thing, shape=_other(thing.shape, SHAPES, rng)))
        case "colour":
            return _with(scene, at, replace(thing, colour=_other(thing.colour, tuple(COLOURS), rng)))
        case "ground":
            return replace(scene, ground=_other(scene.ground, tuple(COLOURS), rng))
        case "relation":
            return replace(scene, relation=_other(scene.relation, RELATIONS, rng))
        case "size":
            return replace(scene, size=_other(scene.size, SIZES, rng))
    return replace(scene, place=_other(scene.place, PLACES, rng))


def _with(scene: Scene, at: int, thing: Thing) -> Scene:
    return replace(scene, things=(*scene.things[:at], thing, *scene.things[at + 1 :]))


def _other(value: str, values: Sequence[str], rng: random.Random) -> str:
    return rng.choice([other for other in values if other != value])
