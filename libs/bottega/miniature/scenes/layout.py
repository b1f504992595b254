"""Layouts: the exact places and sizes of a scene's things, which a caption leaves open.

All lengths are in sides of the picture; (0, 0) is its top left corner.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bottega.miniature.scenes.grammar import Scene, Thing

# Radii. Their ranges are far apart, so that a size can be read back from the picture alone.
SMALL = (0.115, 0.14)
BIG = (0.215, 0.25)
OF_TWO = (0.15, 0.175)
# Distance of a place from the middle; the jitter is less than half of it.
OFFSET = {"small": 0.27, "big": 0.21}
APART = 0.235
_JITTER = 0.02
_DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1), "center": (0, 0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A thing with its exact centre (x, y) and radius."""

    thing: Thing
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneLayout:
    """The things of a picture with their exact places, on a ground."""

    placed: tuple[Placed, ...]
    ground: str


def random_layout(scene: Scene, rng: random.Random) -> SceneLayout:
    """Return one of the layouts that the scene's caption describes."""
    if len(scene.things) == 1:
        return SceneLayout(placed=(_one(scene, rng),), ground=scene.ground)
    return SceneLayout(placed=_two(scene, rng), ground=scene.ground)


def _one(scene: Scene, rng: random.Random) -> Placed:
    across, down = _DIRECTIONS[scene.place]
    offset = OFFSET[scene.size]
    return Placed(
        thing=scene.things[0],
        x=0.5 + across * offset + _jitter(rng),
        y=0.5 + down * offset + _jitter(rng),
        radius=rng.uniform(*(BIG if scene.size == "big" else SMALL)),
    )


def _two(scene: Scene, rng: random.Random) -> tuple[Placed, ...]:
    across, down = (APART, 0.0) if scene.relation == "left of" else (0.0, APART)
    return tuple(
        Placed(
            thing=thing,
            x=0.5 + side * across + _jitter(rng),
            y=0.5 + side * down + _jitter(rng),
            radius=rng.uniform(*OF_TWO),
        )
        for thing, side in zip(scene.things, (-1, 1), strict=True)
    )


def _jitter(rng: random.Random) -> float:
    return rng.uniform(-_JITTER, _JITTER)
