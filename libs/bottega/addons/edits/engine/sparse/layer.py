"""One layer of a masked forward pass over feature maps: its pieces, recorded surroundings, and what it records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bottega.addons.edits.engine.activations import StepActivations
from bottega.addons.edits.engine.masked.rows import MaskedActivations
from bottega.addons.edits.engine.sparse.norms import (
    RecordedStatistics,
    Statistics,
    moments,
    of_tiles,
    scale_and_shift,
    scaled,
)
from bottega.addons.edits.engine.sparse.pieces import Piece, Tiles, Whole, of_rows
from bottega.addons.edits.engine.sparse.rectangles import Rectangle


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """Applies one layer's operations to the pieces of a batch. Lists of tensors have one tensor for each piece.

    A piece is either the whole maps of some rows, or tiles. The tensor of a tile includes `margin` elements around its
    rectangle on each side.
    """

    forward: MaskedActivations
    pieces: Sequence[Piece]
    recorded: Mapping[str, Sequence[Tensor | None]]
    """Recorded tensors by name and row; None for rows that compute whole maps."""
    statistics: RecordedStatistics
    """Cached statistics of the recorded moments."""

    def take(self, parts: Sequence[Tensor], margin: int) -> list[Tensor]:
        """Cut the pieces out of feature maps that are concatenated over channels."""
        return [piece.take(parts, margin) for piece in self.pieces]

    def core(self, maps: Sequence[Tensor], margin: int) -> list[Tensor]:
        """Remove the margins."""
        return [piece.core(each, margin) for piece, each in zip(self.pieces, maps, strict=True)]

    def convolve(self, convolution: nn.Conv2d, maps: Sequence[Tensor], margin: int) -> list[Tensor]:
        """Apply a convolution of stride 1. The margin shrinks by the elements that its kernel reads on each side."""
        return [
            self.convolve_piece(convolution, piece, each, margin) for piece, each in zip(self.pieces, maps, strict=True)
        ]

    def convolve_piece(self, convolution: nn.Conv2d, piece: Piece, maps: Tensor, margin: int) -> Tensor:
        with self.forward.spans.packed(piece.offsets):
            return piece.convolve(convolution, maps, margin)

    def call(self, module: nn.Module, piece: Piece, *inputs: object) -> Tensor:
        """Call a module with a piece's items as the first dimension."""
        with self.forward.spans.packed(piece.offsets):
            made: Tensor = module(*inputs)
        return made

    def add(self, maps: Sequence[Tensor], addends: Tensor) -> list[Tensor]:
        """Add one row of `addends`, [rows, channels], to each element of that row."""
        return [
            each + of_rows(addends, piece.rows)[:, :, None, None] for piece, each in zip(self.pieces, maps, strict=True)
        ]

    def project(self, linear: nn.Linear, maps: Sequence[Tensor]) -> list[Tensor]:
        """Apply a linear layer over the channels."""
        made: list[Tensor] = []
        for piece, each in zip(self.pieces, maps, strict=True):
            items, channels, height, width = each.shape
            tokens = each.permute(0, 2, 3, 1).reshape(-1, channels)
            with self.forward.spans.packed(tuple(offset * height * width for offset in piece.offsets)):
                projected: Tensor = linear(tokens)
            made.append(projected.view(items, height, width, -1).permute(0, 3, 1, 2))
        return made

    def norm(self, norm: nn.GroupNorm, name: str, maps: Sequence[Tensor], margin: int) -> list[Tensor]:
        """Apply a GroupNorm with the statistics of whole maps, see `norms`. `name` is that of the recorded moments."""
        self._record_moments(norm, name, maps, margin)
        parts = self._parts(norm, name, maps, margin)
        scale, shift = scale_and_shift(norm, list(parts.values())) if parts else (None, None)
        place = {row: place for place, row in enumerate(parts)}
        made: list[Tensor] = []
        for piece, each in zip(self.pieces, maps, strict=True):
            if scale is None or shift is None or isinstance(piece, Whole):
                made.append(norm(each))
            else:
                places = [place[row] for row in piece.rows]
                made.append(scaled(each, of_rows(scale, places), of_rows(shift, places)))
        return made

    def join(self, name: str, maps: Sequence[Tensor], size: Sequence[int]) -> Tensor:
        """Return and record the whole feature maps of all rows: the recorded maps, with the pieces pasted in."""
        first = maps[0]
        rests = self.recorded[name]
        whole = first.new_empty(len(rests), first.shape[1], *size)
        for row, rest in zip(whole, rests, strict=True):
            if rest is not None:
                row.copy_(rest.view(row.shape), non_blocking=True)
        for piece, each in zip(self.pieces, maps, strict=True):
            piece.paste(whole, each)
        self.forward.put(name, whole)
        return whole

    def _parts(self, norm: nn.GroupNorm, name: str, maps: Sequence[Tensor], margin: int) -> dict[int, list[Statistics]]:
        """Return the statistics of the parts of the current whole map, for each row with tiles."""
        tiles: dict[int, list[tuple[Rectangle, Statistics]]] = {}
        for piece, each in zip(self.pieces, maps, strict=True):
            if isinstance(piece, Tiles):
                of_piece = of_tiles(norm, piece.core(each, margin))
                for row, rectangle, statistics in zip(piece.rows, piece.rectangles, of_piece, strict=True):
                    tiles.setdefault(row, []).append((rectangle, statistics))
        parts: dict[int, list[Statistics]] = {}
        for row, of_row in tiles.items():
            rest, stored = self.recorded[name][row], self._stored(row, name)
            assert rest is not None, "a row has tiles where its moments are recorded"
            assert stored is not None, "what was brought is stored"
            rectangles = tuple(rectangle for rectangle, _ in of_row)
            outside = self.statistics.outside(rest, rectangles, stored=stored)
            parts[row] = [outside, *(statistics for _, statistics in of_row)]
        return parts

    def _record_moments(self, norm: nn.GroupNorm, name: str, maps: Sequence[Tensor], margin: int) -> None:
        """Record the moments of the current whole maps, for rows that record."""
        recording = {row for row in range(len(self.forward.edits)) if self._sink(row) is not None}
        known = {
            row: rest.to(torch.float32, copy=True)
            for row, rest in enumerate(self.recorded[name])
            if rest is not None and row in recording
        }
        for piece, each in zip(self.pieces, maps, strict=True):
            if recording.isdisjoint(piece.rows):
                continue
            of_items = moments(piece.core(each, margin), norm.num_groups)
            if isinstance(piece, Tiles):
                for row, rectangle, of_tile in zip(piece.rows, piece.rectangles, of_items, strict=True):
                    if row in known:
                        known[row][:, rectangle.rows, rectangle.columns] = of_tile
            else:
                for row, of_row in zip(piece.rows, of_items, strict=True):
                    self._put(row, name, of_row)
        for row, of_map in known.items():
            self._put(row, name, of_map)

    def _stored(self, row: int, name: str) -> Tensor | None:
        edit = self.forward.edits[row]
        return None if edit is None or edit.recorded is None else edit.recorded.stored(name)

    def _sink(self, row: int) -> StepActivations | None:
        edit = self.forward.edits[row]
        return None if edit is None else edit.sink

    def _put(self, row: int, name: str, output: Tensor) -> None:
        sink = self._sink(row)
        if sink is not None:
            sink.put(name, output)
