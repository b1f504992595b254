"""Says which shape a region has, by drawing every shape at the region's place and size and comparing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bottega.miniature.scenes import SHAPES, Placed, Thing, coverage
from bottega.miniature.scenes.outlines import area, centroid
from bottega.quality.oracle.regions import Numbers

# Overlap (intersection over union of soft masks) from which a region is the shape and no blob. Rendered shapes
# reach .9 and more; the shapes reach up to .87 with each other, and blobs less than .85 with all but a few.
LIKE = 0.85
# So much nearer than any other shape.
_AHEAD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """shape: of the grammar, empty for a blob. x, y, radius: in sides of the picture. overlap: 0 to 1."""

    shape: str
    x: float
    y: float
    radius: float
    overlap: float


def recognise(region: Numbers) -> Outline:
    """The shape whose drawing overlaps most with the region.

    region: how much of each pixel it takes, (side, side) in 0 to 1.
    """
    outlines = sorted((_compare(shape, region) for shape in SHAPES), key=lambda outline: -outline.overlap)
    best, second = outlines[:2]
    if best.overlap >= LIKE and best.overlap - second.overlap >= _AHEAD:
        return best
    return Outline(shape="", x=best.x, y=best.y, radius=best.radius, overlap=best.overlap)


def _compare(shape: str, region: Numbers) -> Outline:
    """The shape with the region's area and centre of gravity, and how much both overlap."""
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
