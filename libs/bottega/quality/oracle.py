"""The oracle: a parser of the embedded model's pictures, which finds shapes, colours, sizes, places and relations.

It parses a picture into words of the grammar, without its caption, and compares the result with scenes. It finds the
picture's background, and the regions that stand out from it, by the grammar's colours. It recognises a region's shape
by drawing every shape at the region's place and size and comparing.

It uses no torch. It is strict about edges: with a blur of .6 pixels it misreads up to a twentieth of the pictures, with
.8 a third to a half. It reads .89 to .96 of rendered scenes that went through the embedded VAE (four sets of 300).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import PIL.Image

from bottega.miniature.scenes import COLOURS, SHAPES, Placed, Scene, Thing, coverage
from bottega.miniature.scenes.layout import APART, BIG, OFFSET, SMALL, area, centroid

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
    """Return the region as one shape, or split into its adjoining shapes of different colours."""
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


_BIG_FROM = (SMALL[1] + BIG[0]) / 2
# Distance from the middle of the picture; a nearer place is "center".
_OFF_CENTER = min(OFFSET.values()) / 2
# Of two directions, the lesser may be at most this share of the greater.
_ASLANT = 0.6
# Least overlap (intersection over union of soft masks) of a region and its shape. Rendered shapes reach .9 and more,
# different shapes up to .87 with each other, and most blobs less than .85.
LIKE = 0.85
# Least lead over the second best shape.
_AHEAD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A thing found in a picture."""

    shape: str
    """Shape of the thing; "" if it has no shape of the grammar."""
    colour: str
    size: str
    place: str
    x: float
    """Horizontal position of the centre, in sides of the picture; `y` and `radius` have the same unit."""
    y: float
    radius: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The content that the oracle finds in a picture, in words of the embedded model's grammar."""

    ground: str
    """Colour of the background; "" if there is none."""
    things: tuple[Seen, ...]
    """The things, from left to right, or from top to bottom if one is above the other."""
    relation: str
    """Relation of the first of two things to the second; "" if there is none."""

    @property
    def nothing(self) -> bool:
        """Whether the picture shows no scene: no background, nothing on it, or a thing without shape or colour."""
        return not (self.ground and self.things and all(seen.shape and seen.colour for seen in self.things))


NOTHING = Reading(ground="", things=(), relation="")


def read(picture: PIL.Image.Image) -> Reading:
    """Parse a picture; NOTHING for noise. This takes a few milliseconds."""
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float32)
    ground = find_ground(pixels)
    if ground is None:
        return NOTHING
    things = [_seen(region) for region in find_regions(pixels, ground)]
    if len(things) != 2:
        return Reading(ground=ground.colour, things=tuple(things), relation="")
    relation, ordered = _related(*things)
    return Reading(ground=ground.colour, things=ordered, relation=relation)


def marks(reading: Reading, scene: Scene) -> dict[str, bool]:
    """Return for each property of the scene whether the picture shows it; without sizes and places of two things."""
    expected, seen = scene.things, reading.things
    many = len(expected) == len(seen)
    right = {
        "ground": reading.ground == scene.ground,
        "number": many,
        "shape": many and all(one.shape == other.shape for one, other in zip(expected, seen, strict=True)),
        "colour": many and all(one.colour == other.colour for one, other in zip(expected, seen, strict=True)),
    }
    if len(expected) == 1:
        return {**right, "size": many and seen[0].size == scene.size, "place": many and seen[0].place == scene.place}
    bound = {Thing(shape=one.shape, colour=one.colour) for one in seen} == set(expected)
    return {**right, "bound": many and bound, "relation": many and reading.relation == scene.relation}


def agrees(reading: Reading, scene: Scene) -> bool:
    """Return whether the picture shows all of the scene, and nothing else."""
    return all(marks(reading, scene).values())


def _seen(region: Region) -> Seen:
    outline = recognise(region.coverage)
    return Seen(
        shape=outline.shape,
        colour=region.colour,
        size="big" if outline.radius >= _BIG_FROM else "small",
        place=_place(outline.x - 0.5, outline.y - 0.5),
        x=outline.x,
        y=outline.y,
        radius=outline.radius,
    )


def _place(across: float, down: float) -> str:
    """Return the name of the place at an offset from the middle; "" for a corner."""
    far, near = max(abs(across), abs(down)), min(abs(across), abs(down))
    if far < _OFF_CENTER:
        return "center"
    if near > _ASLANT * far:
        return ""
    if abs(across) > abs(down):
        return "right" if across > 0 else "left"
    return "bottom" if down > 0 else "top"


def _related(one: Seen, other: Seen) -> tuple[str, tuple[Seen, Seen]]:
    """Return the relation of two things, "" if there is none, and both in its order."""
    across, down = other.x - one.x, other.y - one.y
    lateral = abs(across) >= abs(down)
    ordered = (one, other) if (across if lateral else down) >= 0 else (other, one)
    far, near = max(abs(across), abs(down)), min(abs(across), abs(down))
    clear = far >= APART and near <= _ASLANT * far
    return ("left of" if lateral else "above") if clear else "", ordered


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A recognised shape."""

    shape: str
    """Shape of the grammar; "" for a blob."""
    x: float
    """Horizontal position of the centre, in sides of the picture; `y` and `radius` have the same unit."""
    y: float
    radius: float
    overlap: float
    """How much of the shape and the region overlap, 0 to 1."""


def recognise(region: Numbers) -> Outline:
    """Return the shape whose drawing overlaps most with the region.

    Args:
        region: Share of each pixel that the region covers, [side, side], 0 to 1.
    """
    outlines = sorted((_compare(shape, region) for shape in SHAPES), key=lambda outline: -outline.overlap)
    best, second = outlines[:2]
    if best.overlap >= LIKE and best.overlap - second.overlap >= _AHEAD:
        return best
    return Outline(shape="", x=best.x, y=best.y, radius=best.radius, overlap=best.overlap)


def _compare(shape: str, region: Numbers) -> Outline:
    """Return the shape drawn with the region's area and centre of gravity, and how much both overlap."""
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
