"""Rectangles that cover a mask, so that convolutions over them cost as little as may be. Plain geometry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A 3 x 3 convolution over a rectangle reads one element more on each side; of a residual block's two, the first also
# computes one more on each side. As elements of a side, what both cost beside the rectangle's own.
_HALO = 2
# What a rectangle costs beside its elements, in elements: calls, and copies of small pieces.
_CALLS = 32

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """Elements [top, top + height) x [left, left + width) of a feature map."""

    top: int
    left: int
    height: int
    width: int

    @property
    def cost(self) -> int:
        """Of convolutions over it, in elements."""
        return (self.height + _HALO) * (self.width + _HALO) + _CALLS

    @property
    def rows(self) -> slice:
        """Of a feature map."""
        return slice(self.top, self.top + self.height)

    @property
    def columns(self) -> slice:
        """Of a feature map."""
        return slice(self.left, self.left + self.width)


def cover(mask: _Mask) -> tuple[Rectangle, ...]:
    """Rectangles without overlap that hold all set elements of mask [height, width]; none for an empty one.

    The bounding box is cut in two wherever the two boxes of what it holds cost least, as long as that is less.
    """
    box = _bounding_box(mask, 0, 0)
    return () if box is None else tuple(_cut(mask, box))


def pays(rectangles: Sequence[Rectangle], height: int, width: int) -> bool:
    """Whether convolutions over these cost less than over all of a feature map of that size."""
    return sum(each.cost for each in rectangles) < height * width


def _cut(mask: _Mask, box: Rectangle) -> Iterator[Rectangle]:
    held = mask[box.rows, box.columns]
    # Cuts of the columns are cuts of the transposed mask's rows.
    halves = [*_halves(held, box), *([_turned(pair) for pair in _halves(held.T, _turn(box))])]
    best = min(halves, key=_cost, default=None)
    if best is None or _cost(best) >= box.cost:
        yield box
        return
    for half in best:
        yield from _cut(mask, half)


def _halves(held: _Mask, box: Rectangle) -> Iterator[tuple[Rectangle, Rectangle]]:
    """What lies above and below every row of `held`, the content of `box`, boxed. Neither is ever empty."""
    for row in range(1, len(held)):
        above = _bounding_box(held[:row], box.top, box.left)
        below = _bounding_box(held[row:], box.top + row, box.left)
        if above is not None and below is not None:
            yield above, below


def _bounding_box(mask: _Mask, top: int, left: int) -> Rectangle | None:
    """Of what is set. top, left: where the mask's own corner lies."""
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
