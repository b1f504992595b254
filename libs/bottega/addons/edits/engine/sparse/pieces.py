"""Pieces of a layer's work: whole feature maps of some rows, or tiles, which are rectangles of one shape.

Rectangles cover a mask so that convolutions over them cost as little as possible. Both kinds of pieces have the same
methods, so that layers are written once. A tile is cut with a margin, with zeros beyond the picture, and convolved
without padding. That is correct inside the picture and at its borders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from bottega.device.devices import open_device
from bottega.model.operations import Moves

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The whole feature maps of some rows."""

    rows: tuple[int, ...]
    """Indices of the rows, ascending."""
    offsets: tuple[int, ...]

    def take(self, parts: Sequence[Tensor], margin: int = 0) -> Tensor:
        """Return these rows of feature maps [rows, channels, height, width], concatenated over channels."""
        taken = [of_rows(part, self.rows) for part in parts]
        return taken[0] if len(taken) == 1 else torch.cat(taken, dim=1)

    def core(self, maps: Tensor, margin: int) -> Tensor:
        """Return the maps unchanged, because they have no margin."""
        return maps

    def convolve(self, convolution: nn.Conv2d, maps: Tensor, margin: int) -> Tensor:
        """Convolve with the convolution's own padding."""
        made: Tensor = convolution(maps)
        return made

    def paste(self, whole: Tensor, maps: Tensor) -> None:
        """Write the maps into their rows of [rows, channels, height, width]."""
        first = 0
        for run in _runs(self.rows):
            last = first + run.stop - run.start
            whole[run] = maps[first:last]
            first = last


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Tiles of one shape, in any rows."""

    rows: tuple[int, ...]
    """The row of each tile, ascending."""
    rectangles: tuple[Rectangle, ...]
    size: tuple[int, int]
    """Height and width of whole maps."""
    offsets: tuple[int, ...]
    moves: Moves | None = None
    """Kernels that cut and paste; None for plain torch."""

    def take(self, parts: Sequence[Tensor], margin: int = 0) -> Tensor:
        """Cut the tiles with a margin: [tiles, channels, height + 2 * margin, width + 2 * margin]."""
        corners = [(each.top - margin, each.left - margin) for each in self.rectangles]
        shape = self.shape[0] + 2 * margin, self.shape[1] + 2 * margin
        return self.cut(parts, corners, shape)

    def cut(self, parts: Sequence[Tensor], corners: Sequence[tuple[int, int]], shape: tuple[int, int]) -> Tensor:
        """Cut a window of this shape for each tile; see `windows`."""
        cut = windows if self.moves is None else self.moves.cut
        return cut(parts, self.rows, corners, shape)

    def take_enlarged(self, hidden: Tensor, margin: int) -> Tensor:
        """Cut the tiles out of smaller maps, as if these were enlarged to `size` by repeating elements."""
        size = hidden.shape[2:]
        down, across = (_sources(*lengths) for lengths in zip(size, self.size, strict=True))
        shape = self.shape[0] + 2 * margin, self.shape[1] + 2 * margin
        cut = hidden.new_empty(len(self.rows), hidden.shape[1], *shape)
        to_device = open_device(hidden.device).to_device
        for tile, row, each in zip(cut, self.rows, self.rectangles, strict=True):
            rows = to_device(_beside(down, each.top - margin, shape[0]))
            columns = to_device(_beside(across, each.left - margin, shape[1]))
            tile.copy_(hidden[row][:, rows[:, None], columns])
        return cut

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of each tile."""
        return self.rectangles[0].height, self.rectangles[0].width

    def core(self, maps: Tensor, margin: int) -> Tensor:
        """Return the tiles of `maps` without their borders, which are `margin` elements wide."""
        return maps[:, :, margin:-margin, margin:-margin] if margin else maps

    def convolve(self, convolution: nn.Conv2d, maps: Tensor, margin: int) -> Tensor:
        """Convolve without padding; the margin shrinks by the elements that the kernel reads on each side."""
        self._clear_beyond(maps, margin)
        with _unpadded(convolution):
            made: Tensor = convolution(maps)
        return made

    def paste(self, whole: Tensor, maps: Tensor) -> None:
        """Write the tiles to their positions in [rows, channels, height, width]."""
        if self.moves is not None:
            corners = [(each.top, each.left) for each in self.rectangles]
            self.moves.paste(whole, maps, self.rows, corners)
            return
        for row, rectangle, tile in zip(self.rows, self.rectangles, maps, strict=True):
            whole[row, :, rectangle.rows, rectangle.columns] = tile

    def _clear_beyond(self, maps: Tensor, margin: int) -> None:
        """Set the elements beyond the picture to zero, in place, like the padding of a convolution."""
        for tile, rectangle in zip(maps, self.rectangles, strict=True):
            for dim, first, length, total in (
                (1, rectangle.top, rectangle.height, self.size[0]),
                (2, rectangle.left, rectangle.width, self.size[1]),
            ):
                before, after = margin - first, first + length + margin - total
                if before > 0:
                    tile.narrow(dim, 0, before).zero_()
                if after > 0:
                    tile.narrow(dim, tile.shape[dim] - after, after).zero_()


Piece = Whole | Tiles


def pieces(
    rectangles: Sequence[Sequence[Rectangle] | None], size: tuple[int, int], moves: Moves | None = None
) -> tuple[Piece, ...]:
    """Split a layer into pieces, from the rectangles of each row; None stands for a row that computes whole maps."""
    whole = tuple(row for row, of_row in enumerate(rectangles) if of_row is None)
    shapes: dict[tuple[int, int], list[tuple[int, Rectangle]]] = {}
    for row, of_row in enumerate(rectangles):
        for each in of_row or ():
            shapes.setdefault((each.height, each.width), []).append((row, each))
    made: list[Piece] = [Whole(rows=whole, offsets=_offsets(whole, len(rectangles)))] if whole else []
    for alike in shapes.values():
        rows, cut = zip(*alike, strict=True)
        offsets = _offsets(rows, len(rectangles))
        made.append(Tiles(rows=rows, rectangles=cut, size=size, offsets=offsets, moves=moves))
    return tuple(made)


def of_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return these rows of [rows, ...]; a view if they are adjacent."""
    parts = [tensor[run] for run in _runs(rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def windows(
    parts: Sequence[Tensor], rows: Sequence[int], corners: Sequence[tuple[int, int]], shape: tuple[int, int]
) -> Tensor:
    """Cut windows [windows, channels, *shape] out of feature maps that are concatenated over channels.

    The window at `corners[i]`, top and left, is cut from row `rows[i]`. Corners may be negative; elements beyond the
    picture are zero.
    """
    height, width = parts[0].shape[2:]
    channels = sum(part.shape[1] for part in parts)
    cut = parts[0].new_zeros(len(rows), channels, *shape)
    for window, row, (top, left) in zip(cut, rows, corners, strict=True):
        first, last = max(top, 0), min(top + shape[0], height)
        begin, end = max(left, 0), min(left + shape[1], width)
        inside = window[:, first - top : last - top, begin - left : end - left]
        for joined, part in zip(inside.split([part.shape[1] for part in parts]), parts, strict=True):
            joined.copy_(part[row, :, first:last, begin:end])
    return cut


def _sources(length: int, target: int) -> Tensor:
    """Return for each of `target` elements which of `length` elements it repeats, as torch rounds: int64 [target]."""
    places = torch.arange(length, dtype=torch.float32)[None, None]
    return functional.interpolate(places, size=target, mode="nearest")[0, 0].long()


def _beside(sources: Tensor, first: int, length: int) -> Tensor:
    """Return the sources [first, first + length), with arbitrary values beyond the picture."""
    return sources[torch.arange(first, first + length).clamp_(0, len(sources) - 1)]


def _runs(rows: Sequence[int]) -> Iterator[slice]:
    """Return the rows as slices, in order. Indexing with a list would copy it to the GPU and block the thread."""
    first = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place] != rows[place - 1] + 1:
            yield slice(rows[first], rows[place - 1] + 1)
            first = place


def _offsets(owners: Sequence[int], rows: int) -> tuple[int, ...]:
    """Return the rows' offsets, see `RowSpans`. `owners` has the row of each item, ascending."""
    return tuple(sum(owner < row for owner in owners) for row in range(rows + 1))


@contextmanager
def _unpadded(convolution: nn.Conv2d) -> Iterator[None]:
    """Switch off the convolution's padding in the `with` block. Hooks of LoRAs read the setting as well."""
    padding = convolution.padding
    convolution.padding = (0, 0)
    try:
        yield
    finally:
        convolution.padding = padding
