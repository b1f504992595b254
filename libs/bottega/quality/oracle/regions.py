"""Finds the background ("ground") of a picture, and regions that stand out from it, by the grammar's colours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bottega.miniature.scenes import COLOURS

Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.float32]

_NAMES = tuple(COLOURS)
_PALETTE = np.array([COLOURS[name] for name in _NAMES], dtype=np.float32)
# Levels by which a channel must differ from the ground: half the difference of yellow and orange, the nearest pair.
_STANDS_OUT = 36.0
# Euclidean distance in levels within which a pixel has a colour; the nearest pair is 80 apart.
_NEAR = 48.0
# Share of the picture's frame that must show the ground; things may touch the frame.
_FRAME_SHARE = 0.7
# Share of a region's inside that must have one colour of the grammar.
_FLAT_SHARE = 0.8
# Share of a region's inside from which a second colour counts as another thing that touches the first.
_SPLIT_SHARE = 0.2
# Share of the picture below which a region is dirt; the smallest thing has six times as much.
_DIRT_SHARE = 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Connected pixels that show one thing."""

    colour: str
    """Colour of the grammar; "" if the pixels have none in common."""
    coverage: Numbers
    """Share of each pixel of the picture that the region covers, [side, side], 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The background of a picture."""

    colour: str
    """Colour of the grammar."""
    level: Numbers
    """Red, green and blue of the background in this picture."""


def find_ground(pixels: Numbers) -> Ground | None:
    """Return the background: the colour of nearly all pixels at the picture's border; None if they have no common one.

    Args:
        pixels: [side, side, 3], 0 to 255.
    """
    names = nearest(pixels)
    frame = np.ones(names.shape, dtype=bool)
    frame[2:-2, 2:-2] = False
    counts = np.bincount(names[frame & (names >= 0)], minlength=len(_NAMES))
    best = int(counts.argmax())
    if counts[best] < _FRAME_SHARE * frame.sum():
        return None
    return Ground(colour=_NAMES[best], level=np.median(pixels[names == best], axis=0).astype(np.float32))


def find_regions(pixels: Numbers, ground: Ground) -> list[Region]:
    """Return all regions that stand out from the background, except for tiny ones."""
    mask = np.abs(pixels - ground.level).max(axis=-1) > _STANDS_OUT
    dirt = _DIRT_SHARE * mask.size
    found = []
    for region in _connected(mask):
        if region.sum() >= dirt:
            found += [part for part in _by_colour(region, pixels, ground) if part.coverage.sum() >= dirt]
    return found


def nearest(pixels: Numbers) -> npt.NDArray[np.int64]:
    """Return for each pixel the index of the grammar's colour that it shows; -1 for none."""
    distances = np.linalg.norm(pixels[..., None, :] - _PALETTE, axis=-1)
    return np.where(distances.min(axis=-1) <= _NEAR, distances.argmin(axis=-1), -1)


def _by_colour(region: Mask, pixels: Numbers, ground: Ground) -> list[Region]:
    """Return the region as one, or split into touching things of different colours."""
    inside = _shrunk(region) if _shrunk(region).any() else region
    names = nearest(pixels)
    counts = np.bincount(names[inside & (names >= 0)], minlength=len(_NAMES))
    colours = [int(name) for name in np.argsort(-counts) if counts[name] >= _SPLIT_SHARE * inside.sum()]
    if not colours or counts[colours].sum() < _FLAT_SHARE * inside.sum():
        return [Region(colour="", coverage=region.astype(np.float32))]
    if len(colours) == 1:
        return [_region(colours[0], region, pixels, ground)]
    owners = np.linalg.norm(pixels[..., None, :] - _PALETTE[colours], axis=-1).argmin(axis=-1)
    parts = [(colour, _largest(region & (owners == number))) for number, colour in enumerate(colours)]
    return [_region(colour, part, pixels, ground) for colour, part in parts]


def _region(colour: int, region: Mask, pixels: Numbers, ground: Ground) -> Region:
    """Return the region with soft edges, where each pixel in or next to it lies between background and colour."""
    inside = region & (nearest(pixels) == colour)
    towards = np.median(pixels[inside], axis=0) - ground.level
    gone = (pixels - ground.level) @ towards / float(towards @ towards)
    coverage = np.where(_grown(region), gone.clip(0.0, 1.0), 0.0)
    return Region(colour=_NAMES[colour], coverage=coverage.astype(np.float32))


def _connected(mask: Mask) -> list[Mask]:
    """Split a mask into connected parts, whose pixels share sides."""
    todo = set(zip(*(axis.tolist() for axis in mask.nonzero()), strict=True))
    parts = []
    while todo:
        open_ends = [todo.pop()]
        part = np.zeros_like(mask)
        while open_ends:
            row, column = open_ends.pop()
            part[row, column] = True
            around = ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1))
            fresh = [pixel for pixel in around if pixel in todo]
            todo.difference_update(fresh)
            open_ends += fresh
        parts.append(part)
    return parts


def _largest(mask: Mask) -> Mask:
    return max(_connected(mask), key=lambda part: int(part.sum()))


def _shrunk(mask: Mask) -> Mask:
    """Return the mask without the pixels that have a neighbour outside."""
    return ~_grown(~mask)


def _grown(mask: Mask) -> Mask:
    """Return the mask with the pixels that have a neighbour inside."""
    padded = np.pad(mask, 1)
    return mask | padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:]
