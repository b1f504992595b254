"""Draws layouts as pictures: flat colours, smooth edges. The same layout always gives the same pixels."""

from __future__ import annotations

import PIL.Image
import PIL.ImageDraw

from bottega.miniature.scenes.grammar import COLOURS
from bottega.miniature.scenes.layout import Placed, SceneLayout
from bottega.miniature.scenes.outlines import outline

SIDE = 64
FINE = 4
"""Pixels drawn per side of a shown pixel."""


def render(layout: SceneLayout, side: int = SIDE) -> PIL.Image.Image:
    """Return an RGB picture of `side` x `side` pixels."""
    fine = PIL.Image.new("RGB", (side * FINE, side * FINE), COLOURS[layout.ground])
    pen = PIL.ImageDraw.Draw(fine)
    for placed in layout.placed:
        filled, *holes = (points(polygon, placed, side) for polygon in outline(placed.thing.shape))
        pen.polygon(filled, fill=COLOURS[placed.thing.colour])
        for hole in holes:
            pen.polygon(hole, fill=COLOURS[layout.ground])
    return fine.resize((side, side), PIL.Image.Resampling.BOX)


def coverage(placed: Placed, side: int = SIDE) -> PIL.Image.Image:
    """Return how much of each pixel the thing covers: a grey picture, 255 is all of it."""
    fine = PIL.Image.new("L", (side * FINE, side * FINE), 0)
    pen = PIL.ImageDraw.Draw(fine)
    for polygon, value in zip(outline(placed.thing.shape), (255, 0), strict=False):
        pen.polygon(points(polygon, placed, side), fill=value)
    return fine.resize((side, side), PIL.Image.Resampling.BOX)


def points(polygon: tuple[tuple[float, float], ...], placed: Placed, side: int) -> list[tuple[float, float]]:
    """Return a thing's polygon in fine pixels."""
    # Pillow fills the pixels whose centres lie inside, with centres at whole numbers: half a fine pixel off.
    scale = side * FINE
    return [
        ((placed.x + x * placed.radius) * scale - 0.5, (placed.y + y * placed.radius) * scale - 0.5) for x, y in polygon
    ]
