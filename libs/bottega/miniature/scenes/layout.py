"""Layouts: the exact places and sizes of a scene's things, which a caption does not say, and outlines of the shapes.

The unit of length in a layout is the side of the picture; (0, 0) is its top left corner. Outlines are polygons around
the origin inside a circle of radius 1; y points down.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from bottega.miniature.scenes.grammar import Scene, Thing

Point = tuple[float, float]
Polygon = tuple[Point, ...]
_ROUND = 96
# Radius of a ring's hole, and of a star's inner corners; half the width of a cross's arms.
_HOLE = 0.56
_INNER = 0.45
_ARM = 0.3
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
    """The things of a picture with their exact places, on a background."""

    placed: tuple[Placed, ...]
    ground: str


def random_layout(scene: Scene, rng: random.Random) -> SceneLayout:
    """Return a random layout that fits the scene's caption."""
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


def outline(shape: str) -> tuple[Polygon, ...]:
    """Return the polygons of a shape: the first is filled, the second, if there is one, is a hole in it."""
    if shape == "ring":
        return (_circle(1.0), _circle(_HOLE))
    return (_FILLED[shape],)


def area(shape: str) -> float:
    """Return the area of the shape, in squares of its radius."""
    filled, *holes = (_area(polygon) for polygon in outline(shape))
    return filled - sum(holes)


def centroid(shape: str) -> Point:
    """Return the centroid of the shape. Holes are centred on the origin and do not change it."""
    polygon = outline(shape)[0]
    pairs = list(zip(polygon, (*polygon[1:], polygon[0]), strict=True))
    crosses = [x * v - u * y for (x, y), (u, v) in pairs]
    total = 3.0 * sum(crosses)
    across = sum((x + u) * cross for ((x, _), (u, _)), cross in zip(pairs, crosses, strict=True)) / total
    down = sum((y + v) * cross for ((_, y), (_, v)), cross in zip(pairs, crosses, strict=True)) / total
    return across, down


def _circle(radius: float) -> Polygon:
    turns = (2 * math.pi * step / _ROUND for step in range(_ROUND))
    return tuple((radius * math.cos(turn), radius * math.sin(turn)) for turn in turns)


def _star() -> Polygon:
    radii = (1.0, _INNER) * 5
    turns = (math.pi * (step / 5 - 0.5) for step in range(10))
    return tuple((radius * math.cos(turn), radius * math.sin(turn)) for radius, turn in zip(radii, turns, strict=True))


def _heart() -> Polygon:
    # The well-known curve, 32 wide; moved so that its bounding box is centred, then scaled into the circle.
    points = []
    for step in range(_ROUND):
        turn = 2 * math.pi * step / _ROUND
        down = 13 * math.cos(turn) - 5 * math.cos(2 * turn) - 2 * math.cos(3 * turn) - math.cos(4 * turn)
        points.append((math.sin(turn) ** 3 * 16 / 17, (-down - 2.5) / 17))
    return tuple(points)


def _area(polygon: Polygon) -> float:
    pairs = zip(polygon, (*polygon[1:], polygon[0]), strict=True)
    return abs(sum(x * v - u * y for (x, y), (u, v) in pairs)) / 2


_CROSS: Polygon = (
    (-_ARM, -1.0),
    (_ARM, -1.0),
    (_ARM, -_ARM),
    (1.0, -_ARM),
    (1.0, _ARM),
    (_ARM, _ARM),
    (_ARM, 1.0),
    (-_ARM, 1.0),
    (-_ARM, _ARM),
    (-1.0, _ARM),
    (-1.0, -_ARM),
    (-_ARM, -_ARM),
)
_SIDE = 0.84  # a square whose corners stay near the circle looks as big as the other shapes
_FILLED: dict[str, Polygon] = {
    "circle": _circle(1.0),
    "square": ((-_SIDE, -_SIDE), (_SIDE, -_SIDE), (_SIDE, _SIDE), (-_SIDE, _SIDE)),
    "triangle": ((0.0, -0.92), (1.0, 0.84), (-1.0, 0.84)),
    "star": _star(),
    "cross": _CROSS,
    "heart": _heart(),
    "diamond": ((0.0, -1.05), (0.8, 0.0), (0.0, 1.05), (-0.8, 0.0)),
}
