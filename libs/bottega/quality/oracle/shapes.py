"""Recognises a region's shape by drawing every shape at the region's place and size and comparing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bottega.miniature.scenes import SHAPES, Placed, Thing, coverage
from bottega.miniature.scenes.outlines import area, centroid
from bottega.quality.oracle.regions import Numbers

# Least overlap (intersection over union of soft masks) of a region and its shape. Rendered shapes reach .9 and more,
# different shapes up to .87 with each other, and most blobs less than .85.
LIKE = 0.85
# Least lead over the second best shape.
_AHEAD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A recognised shape."""

    shape: str
    """Shape of the grammar, "" for a blob."""
    x: float
    """In sides of the picture, like y and radius."""
    y: float
    radius: float
    overlap: float
    """0 to 1."""


def recognise(region: Numbers) -> Outline:
    """Return the shape whose drawing overlaps most with the region.

    Args:
        region: How much of each pixel it covers, [side, side], 0 to 1.
    """
    outlines = sorted((_compare(shape, region) for shape in SHAPES), key=lambda outline: -outline.overlap)
    best, second = outlines[:2]
    if best.overlap >= LIKE and best.overlap - second.overlap >= _AHEAD:
        return best
    return Outline(shape="", x=best.x, y=best.y, radius=best.radius, overlap=best.overlap)


def _compare(shape: str, region: Numbers) -> Outline:
    """Return the shape with the region's area and centre of gravity, and how much both overlap."""
    side = region.shape[0]
    total = float(region.sum())
    middles = (np.arange(side) + 0.5) / side
    radius = math.sqrt(total / area(shape)) / side
    across, down = centroid(shape)
    x = float(region.sum(axis=0) @ middles) / total - across * radius
    y = float(region.sum(axis=1) @ middles) / total - down * radius
    placed = Placed(thing=Thing(shape=shape, colour=""), x=x, y=y, radius=radius)
    drawn = np.asarray(coverage(placed, side), dtype=np.float32) / 255.0
    overlap = float(np.minimum(drawn, region).sum() / np.maximum(drawn, region).sum())
    return Outline(shape=shape, x=x, y=y, radius=radius, overlap=overlap)
