"""Draws layouts as pictures, in the styles for which the embedded model has LoRAs, and as images for its ControlNets.

Pictures have flat colours and smooth edges. The same layout always gives the same pixels. In each style, every word of
the caption stays true. A style changes shades, not colours: `quality.oracle` takes anything that differs more from its
background for a thing. Control images are thin outlines, or silhouettes of the things, drawn from a layout or found in
a picture. They are RGB, white on black, so that users can draw them by hand, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import PIL.Image
import PIL.ImageChops
import PIL.ImageDraw
import PIL.ImageFilter

from bottega.miniature.scenes.grammar import COLOURS
from bottega.miniature.scenes.layout import Placed, SceneLayout, outline

# How much larger things are in every style, because the shapes of small ones are hard to see on a pattern. Small ones
# stay below the middle between the sizes.
_LARGER = 1.1
# Levels by which the light shade of a ground is above its colour, and above the dark shade. The oracle tolerates 36.
_LIGHT, _APART = 14, 28
# In pixels: a stripe and the gap to the next one along a row; a square; the plain ground around a thing.
_STRIPES, _SQUARE, _RIM = 16, 8, 2
# Levels by which the picture is lighter at the top and darker at the bottom. LoRAs that learned 24 drew the top of
# light grounds lighter than the oracle tolerates.
_DUSK = 18
# Thickness of an outline, in pixels of the picture.
_THICK = 1.25
# Differences of neighbours in levels: below the first there is no edge, from the second on an edge is white. Yellow and
# orange, the most similar colours of the grammar, differ by 72; a smooth edge between them has two halves.
_NO_EDGE, _WHITE_EDGE = 12, 36
SIDE = 64
FINE = 4
"""Supersampling factor: pixels drawn along each side of a pixel of the result."""


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
    """Return how much of each pixel the thing covers, as a grey picture in which 255 is all of it."""
    fine = PIL.Image.new("L", (side * FINE, side * FINE), 0)
    pen = PIL.ImageDraw.Draw(fine)
    for polygon, value in zip(outline(placed.thing.shape), (255, 0), strict=False):
        pen.polygon(points(polygon, placed, side), fill=value)
    return fine.resize((side, side), PIL.Image.Resampling.BOX)


def points(polygon: tuple[tuple[float, float], ...], placed: Placed, side: int) -> list[tuple[float, float]]:
    """Return a thing's polygon in pixels of the supersampled picture."""
    # Pillow fills the pixels whose centres lie inside, with centres at whole numbers: half a fine pixel off.
    scale = side * FINE
    return [
        ((placed.x + x * placed.radius) * scale - 0.5, (placed.y + y * placed.radius) * scale - 0.5) for x, y in polygon
    ]


def draw_edges(layout: SceneLayout, side: int = SIDE) -> PIL.Image.Image:
    """Return the outlines of all things, about one pixel thick."""
    fine = PIL.Image.new("L", (side * FINE, side * FINE), 0)
    pen = PIL.ImageDraw.Draw(fine)
    for placed in layout.placed:
        for polygon in outline(placed.thing.shape):
            line = points(polygon, placed, side)
            pen.line([*line, *line[:2]], fill=255, width=round(_THICK * FINE), joint="curve")
    return fine.resize((side, side), PIL.Image.Resampling.BOX).convert("RGB")


def draw_layout(layout: SceneLayout, side: int = SIDE) -> PIL.Image.Image:
    """Return the filled silhouettes of all things."""
    whole = PIL.Image.new("L", (side, side), 0)
    for placed in layout.placed:
        whole = PIL.ImageChops.lighter(whole, coverage(placed, side))
    return whole.convert("RGB")


def find_edges(picture: PIL.Image.Image, side: int = SIDE) -> PIL.Image.Image:
    """Return the edges of any picture, one to two pixels thick.

    A picture that is not square is stretched. Fine texture becomes edges, too; blur the picture first to avoid that.
    """
    sized = picture.convert("RGB").resize((side, side), PIL.Image.Resampling.BOX)
    steep = PIL.ImageChops.lighter(_differences(sized, 1, 0), _differences(sized, 0, 1))
    red, green, blue = steep.split()
    strongest = PIL.ImageChops.lighter(red, PIL.ImageChops.lighter(green, blue))
    slope = 255 / (_WHITE_EDGE - _NO_EDGE)
    return strongest.point([round(min(max((level - _NO_EDGE) * slope, 0), 255)) for level in range(256)]).convert("RGB")


DRAWN: dict[str, Callable[[SceneLayout], PIL.Image.Image]] = {"edges": draw_edges, "layout": draw_layout}
"""Functions that draw control images, by the name of the embedded model's ControlNet."""


def _differences(picture: PIL.Image.Image, across: int, down: int) -> PIL.Image.Image:
    """Return the difference of each pixel from its neighbour; 0 at the border, where there is none."""
    moved = picture.copy()
    moved.paste(picture.crop((across, down, *picture.size)), (0, 0))
    return PIL.ImageChops.difference(picture, moved)


def striped(layout: SceneLayout) -> PIL.Image.Image:
    """Return the layout on a background of slanting stripes in two shades."""
    return _on_ground(layout, _stripes())


def checked(layout: SceneLayout) -> PIL.Image.Image:
    """Return the layout on a background of squares in two shades, like a chess board."""
    return _on_ground(layout, _squares())


def dusk(layout: SceneLayout) -> PIL.Image.Image:
    """Return the layout with everything light at the top and dark at the bottom."""
    picture = render(_larger(layout))
    darkness = PIL.Image.linear_gradient("L").resize((SIDE, SIDE))
    return PIL.Image.composite(_shifted(picture, -_DUSK), _shifted(picture, _DUSK), darkness)


STYLES: dict[str, Callable[[SceneLayout], PIL.Image.Image]] = {"striped": striped, "checked": checked, "dusk": dusk}
"""Functions that draw pictures in a style, by the name of the embedded model's LoRA that was trained on it."""


def _on_ground(layout: SceneLayout, pattern: PIL.Image.Image) -> PIL.Image.Image:
    """Return the layout on a patterned background.

    Args:
        pattern: Grey, white where the background is dark.
    """
    larger = _larger(layout)
    plain = PIL.Image.new("RGB", (SIDE, SIDE), COLOURS[layout.ground])
    light = _shifted(plain, _LIGHT)
    ground = PIL.Image.composite(_shifted(light, -_APART), light, pattern)
    return PIL.Image.composite(render(larger), ground, _near_things(larger))


def _larger(layout: SceneLayout) -> SceneLayout:
    return replace(layout, placed=tuple(replace(one, radius=_LARGER * one.radius) for one in layout.placed))


def _near_things(layout: SceneLayout) -> PIL.Image.Image:
    """Return a grey mask that is black around the things, so that the pattern does not touch them."""
    covered = PIL.Image.new("L", (SIDE, SIDE), 0)
    for placed in layout.placed:
        covered = PIL.ImageChops.lighter(covered, coverage(placed))
    return covered.filter(PIL.ImageFilter.MaxFilter(2 * _RIM + 1))


def _shifted(picture: PIL.Image.Image, levels: int) -> PIL.Image.Image:
    return picture.point([min(max(level + levels, 0), 255) for level in range(256)] * 3)


@cache
def _stripes() -> PIL.Image.Image:
    return _pattern(lambda x, y: (x + y) % _STRIPES < _STRIPES // 2)


@cache
def _squares() -> PIL.Image.Image:
    return _pattern(lambda x, y: (x // _SQUARE + y // _SQUARE) % 2 == 0)


def _pattern(dark: Callable[[float, float], bool]) -> PIL.Image.Image:
    """Return a grey pattern.

    Args:
        dark: Returns whether the point (x, y), in pixels, is dark.
    """
    fine = PIL.Image.new("L", (SIDE * FINE, SIDE * FINE))
    fine.putdata([255 * dark(x / FINE, y / FINE) for y in range(SIDE * FINE) for x in range(SIDE * FINE)])
    return fine.resize((SIDE, SIDE), PIL.Image.Resampling.BOX)
