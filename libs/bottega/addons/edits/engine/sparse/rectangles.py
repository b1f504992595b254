"""Covers a mask with rectangles, so that convolutions over them cost as little as possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Extra elements per side in the cost of a rectangle. A 3 x 3 convolution reads one more element on each side; the first
# of a residual block's two also computes one more.
_HALO = 2
# Fixed cost of a rectangle, in elements: calls, and copies of small pieces.
_CALLS = 32

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """The elements [top, top + height) x [left, left + width) of a feature map."""

    top: int
    left: int
    height: int
    width: int

    @property
    def cost(self) -> int:
        """Cost of convolutions over the rectangle, in elements."""
        return (self.height + _HALO) * (self.width + _HALO) + _CALLS

    @property
    def rows(self) -> slice:
        return slice(self.top, self.top + self.height)

    @property
    def columns(self) -> slice:
        return slice(self.left, self.left + self.width)


def cover(mask: _Mask) -> tuple[Rectangle, ...]:
    """Return disjoint rectangles that contain all set elements of a mask [height, width]; none for an empty mask.

    The bounding box is split recursively, at the position where the bounding boxes of both halves cost least, as long
    as the split lowers the cost.
    """
    box = _bounding_box(mask, 0, 0)
    return () if box is None else tuple(_cut(mask, box))


def pays(rectangles: Sequence[Rectangle], height: int, width: int) -> bool:
    """Return whether convolutions over these rectangles cost less than over a whole feature map."""
    return sum(each.cost for each in rectangles) < height * width


def _cut(mask: _Mask, box: Rectangle) -> Iterator[Rectangle]:
    held = mask[box.rows, box.columns]
    # Splitting columns is splitting rows of the transposed mask.
    halves = [*_halves(held, box), *([_turned(pair) for pair in _halves(held.T, _turn(box))])]
    best = min(halves, key=_cost, default=None)
    if best is None or _cost(best) >= box.cost:
        yield box
        return
    for half in best:
        yield from _cut(mask, half)


def _halves(held: _Mask, box: Rectangle) -> Iterator[tuple[Rectangle, Rectangle]]:
    """Yield the bounding boxes above and below every row of `held`, the content of `box`. Neither is ever empty."""
    for row in range(1, len(held)):
        above = _bounding_box(held[:row], box.top, box.left)
        below = _bounding_box(held[row:], box.top + row, box.left)
        if above is not None and below is not None:
            yield above, below


def _bounding_box(mask: _Mask, top: int, left: int) -> Rectangle | None:
    """Return the bounding box of the set elements; None without any. `top` and `left` are the position of the mask."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return None
    return Rectangle(
        top=top + int(rows[0]),
        left=left + int(columns[0]),
        height=int(rows[-1] - rows[0]) + 1,
        width=int(columns[-1] - columns[0]) + 1,
    )


def _cost(pair: tuple[Rectangle, Rectangle]) -> int:
    return pair[0].cost + pair[1].cost


def _turn(box: Rectangle) -> Rectangle:
    return Rectangle(top=box.left, left=box.top, height=box.width, width=box.height)


def _turned(pair: tuple[Rectangle, Rectangle]) -> tuple[Rectangle, Rectangle]:
    return _turn(pair[0]), _turn(pair[1])
