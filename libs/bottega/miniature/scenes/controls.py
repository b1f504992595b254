"""Control images for ControlNets: thin outlines, or silhouettes of the things.

They are drawn from a layout, or found in any picture. They are RGB, white on black, so that users can draw them by
hand, too.
"""

from __future__ import annotations

from collections.abc import Callable

import PIL.Image
import PIL.ImageChops
import PIL.ImageDraw

from bottega.miniature.scenes.layout import SceneLayout
from bottega.miniature.scenes.outlines import outline
from bottega.miniature.scenes.render import FINE, SIDE, coverage, points

# Thickness of an outline, in pixels of the picture.
_THICK = 1.25
# Differences of neighbours in levels: below the first there is no edge, from the second on an edge is white. Yellow and
# orange, the most similar colours of the grammar, differ by 72; a smooth edge between them has two halves.
_NO_EDGE, _WHITE_EDGE = 12, 36


def draw_edges(layout: SceneLayout, side: int = SIDE) -> PIL.Image.Image:
    """Return the outlines of all things, about a pixel thick."""
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

    A picture that is not square is stretched. Fine texture becomes edges, too: blur it first.
    """
    sized = picture.convert("RGB").resize((side, side), PIL.Image.Resampling.BOX)
    steep = PIL.ImageChops.lighter(_differences(sized, 1, 0), _differences(sized, 0, 1))
    red, green, blue = steep.split()
    strongest = PIL.ImageChops.lighter(red, PIL.ImageChops.lighter(green, blue))
    slope = 255 / (_WHITE_EDGE - _NO_EDGE)
    return strongest.point([round(min(max((level - _NO_EDGE) * slope, 0), 255)) for level in range(256)]).convert("RGB")


DRAWN: dict[str, Callable[[SceneLayout], PIL.Image.Image]] = {"edges": draw_edges, "layout": draw_layout}
"""Functions that draw the control images for each of the miniature's ControlNets."""


def _differences(picture: PIL.Image.Image, across: int, down: int) -> PIL.Image.Image:
    """Return the difference of each pixel from its neighbour; 0 at the border without a neighbour."""
    moved = picture.copy()
    moved.paste(picture.crop((across, down, *picture.size)), (0, 0))
    return PIL.ImageChops.difference(picture, moved)
