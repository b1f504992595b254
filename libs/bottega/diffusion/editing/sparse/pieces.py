"""Pieces of a layer's work: whole feature maps of some rows, or tiles, the rectangles of one shape of others.

Both are cut out, convolved and put back by the same calls, so that a layer is written once. A tile is cut out with a
margin, zeros beyond the picture, and convolved without padding: right inside the picture and at its borders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bottega.diffusion.device.pick import open_device
from bottega.diffusion.editing.sparse.rectangles import Rectangle
from bottega.diffusion.operations import Moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """All of some rows' feature maps. rows: ascending. offsets: see RowSpans."""

    rows: tuple[int, ...]
    offsets: tuple[int, ...]

    def take(self, parts: Sequence[Tensor], margin: int = 0) -> Tensor:
        """Of feature maps [rows, channels, height, width], joined over channels."""
        taken = [of_rows(part, self.rows) for part in parts]
        return taken[0] if len(taken) == 1 else torch.cat(taken, dim=1)

    def core(self, maps: Tensor, margin: int) -> Tensor:
        """They have no margin."""
        return maps

    def convolve(self, convolution: nn.Conv2d, maps: Tensor, margin: int) -> Tensor:
        """With the convolution's own padding."""
        made: Tensor = convolution(maps)
        return made

    def paste(self, whole: Tensor, maps: Tensor) -> None:
        """Writes them to the rows of [rows, channels, height, width]."""
        first = 0
        for run in _runs(self.rows):
            last = first + run.stop - run.start
            whole[run] = maps[first:last]
            first = last


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Rectangles of one shape. rows: whose each is, ascending. size: of whole maps. offsets: see RowSpans.

    moves: cuts and pastes; None: the plain ways.
    """

    rows: tuple[int, ...]
    rectangles: tuple[Rectangle, ...]
    size: tuple[int, int]
    offsets: tuple[int, ...]
    moves: Moves | None = None

    def take(self, parts: Sequence[Tensor], margin: int = 0) -> Tensor:
        """Cut out with `margin` elements more on each side: [tiles, channels, height + 2 * margin, ...]."""
        corners = [(each.top - margin, each.left - margin) for each in self.rectangles]
        shape = self.shape[0] + 2 * margin, self.shape[1] + 2 * margin
        return self.cut(parts, corners, shape)

    def cut(self, parts: Sequence[Tensor], corners: Sequence[tuple[int, int]], shape: tuple[int, int]) -> Tensor:
        """A window of that shape for each rectangle, see `windows`."""
        cut = windows if self.moves is None else self.moves.cut
        return cut(parts, self.rows, corners, shape)

    def take_enlarged(self, hidden: Tensor, margin: int) -> Tensor:
        """Cut out of smaller maps as they are when their elements have been repeated to the size of whole ones."""
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
        """Height and width of each."""
        return self.rectangles[0].height, self.rectangles[0].width

    def core(self, maps: Tensor, margin: int) -> Tensor:
        """The rectangles alone."""
        return maps[:, :, margin:-margin, margin:-margin] if margin else maps

    def convolve(self, convolution: nn.Conv2d, maps: Tensor, margin: int) -> Tensor:
        """Without padding: what comes out has a margin less by what the kernel reads on each side."""
        self._clear_beyond(maps, margin)
        with _unpadded(convolution):
            made: Tensor = convolution(maps)
        return made

    def paste(self, whole: Tensor, maps: Tensor) -> None:
        """Writes them to their places in [rows, channels, height, width]."""
        if self.moves is not None:
            corners = [(each.top, each.left) for each in self.rectangles]
            self.moves.paste(whole, maps, self.rows, corners)
            return
        for row, rectangle, tile in zip(self.rows, self.rectangles, maps, strict=True):
            whole[row, :, rectangle.rows, rectangle.columns] = tile

    def _clear_beyond(self, maps: Tensor, margin: int) -> None:
        """Zeros beyond the picture, in place: what a convolution with padding sees there."""
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
    """rectangles: of each row; None for one that is computed whole. size: height and width of whole maps.

    moves: see Tiles.
    """
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
    """Of [rows, ...]; a view where they stand side by side."""
    parts = [tensor[run] for run in _runs(rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def windows(
    parts: Sequence[Tensor], rows: Sequence[int], corners: Sequence[tuple[int, int]], shape: tuple[int, int]
) -> Tensor:
    """Windows of one shape, cut out of feature maps that are joined over channels; zeros beyond the picture.

    rows, corners: of each window; its top and left may be negative. Returns [windows, channels, *shape].
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
    """Which of `length` elements each of `target` repeats, as torch counts them: int64 [target]."""
    places = torch.arange(length, dtype=torch.float32)[None, None]
    return functional.interpolate(places, size=target, mode="nearest")[0, 0].long()


def _beside(sources: Tensor, first: int, length: int) -> Tensor:
    """[first, first + length) of them; anything for places beyond the picture, which the convolution clears."""
    return sources[torch.arange(first, first + length).clamp_(0, len(sources) - 1)]


def _runs(rows: Sequence[int]) -> Iterator[slice]:
    """The rows in their order, as slices: a list as an index would be copied to a GPU, and the thread would wait."""
    first = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place] != rows[place - 1] + 1:
            yield slice(rows[first], rows[place - 1] + 1)
            first = place


def _offsets(owners: Sequence[int], rows: int) -> tuple[int, ...]:
    """owners: the row of each item, ascending."""
    return tuple(sum(owner < row for owner in owners) for row in range(rows + 1))


@contextmanager
def _unpadded(convolution: nn.Conv2d) -> Iterator[None]:
    """In the block the convolution does not pad. Its hooks, by which LoRAs beside the weights count, read from it
    that they must not, either."""
    padding = convolution.padding
    convolution.padding = (0, 0)
    try:
        yield
    finally:
        convolution.padding = padding
