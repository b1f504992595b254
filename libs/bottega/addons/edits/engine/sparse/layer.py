"""One layer of a masked forward pass over feature maps: its pieces, recorded surroundings, and what it records.

GroupNorm needs the statistics of the whole map. Instead of its input, only the moments are recorded: mean and standard
deviation over the channels of each group, at each element. The recorded moments outside the tiles and the tiles' own
values give the statistics of the current map, for a fraction of the map's bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from bottega.addons.edits.engine.activations import StepActivations
from bottega.addons.edits.engine.masked.tokens import MaskedActivations
from bottega.addons.edits.engine.sparse.pieces import Piece, Rectangle, Tiles, Whole, of_rows
from bottega.device.devices import open_device

# Masks per template that are cached. Each takes half a kilobyte for each norm and forward.
_KNOWN_MASKS = 8
_KNOWN_WEIGHTS = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Statistics:
    """Mean and variance of each group over some elements of a feature map, float32 [groups]."""

    mean: Tensor
    variance: Tensor
    elements: int
    """Number of elements over which mean and variance were computed."""


def moments(feature_map: Tensor, groups: int) -> Tensor:
    """Return the moments of [rows, channels, height, width]: [rows, 2 * groups, height, width], means first."""
    rows, channels, height, width = feature_map.shape
    grouped = feature_map.float().reshape(rows, groups, channels // groups, height, width)
    # torch.var_mean takes several times as long on a CPU.
    mean = grouped.mean(dim=2)
    return torch.cat([mean, (grouped - mean[:, :, None]).square_().mean(dim=2).sqrt_()], dim=1)


class RecordedStatistics:
    """Caches the statistics of recorded moments outside the tiles, as long as the recorded tensor lives.

    They are the same for every edit with the same mask, because later additions to a recording are inside earlier
    masks.
    """

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, dict[tuple[Rectangle, ...], Statistics]] = WeakIdKeyDictionary()

    def outside(self, recorded: Tensor, rectangles: tuple[Rectangle, ...], *, stored: Tensor) -> Statistics:
        """Return the statistics of moments [2 * groups, height, width] outside the rectangles, which must not overlap.

        `stored` is the tensor from which `recorded` was copied, or `recorded` itself; see `RecordedActivations`.
        """
        of_masks = self._known.setdefault(stored, {})
        found = of_masks.get(rectangles)
        if found is None:
            if len(of_masks) == _KNOWN_MASKS:
                del of_masks[next(iter(of_masks))]
            found = of_masks[rectangles] = _outside(recorded, rectangles)
        return found


def _outside(recorded: Tensor, rectangles: Sequence[Rectangle]) -> Statistics:
    means, deviations = recorded.float().chunk(2)
    height, width = recorded.shape[1:]
    inside = torch.zeros(height, width, dtype=torch.bool)
    for each in rectangles:
        inside[each.rows, each.columns] = True
    outside = open_device(recorded.device).to_device((~inside).float())
    elements = height * width - sum(each.height * each.width for each in rectangles)
    share = 1 / max(elements, 1)
    mean = (means * outside).sum(dim=(1, 2)) * share
    spread = (means - mean[:, None, None]).square() + deviations.square()
    return Statistics(mean=mean, variance=(spread * outside).sum(dim=(1, 2)) * share, elements=elements)


def of_tiles(norm: nn.GroupNorm, tiles: Tensor) -> list[Statistics]:
    """Return the statistics of each tile in [tiles, channels, height, width]."""
    count, channels, height, width = tiles.shape
    elements = height * width
    # The normalized output is discarded; this is the only call that returns mean and variance of every group.
    _, mean, inverse = torch.native_group_norm(
        tiles.float().contiguous(), None, None, count, channels, elements, norm.num_groups, norm.eps
    )
    variance = inverse.pow(-2).sub_(norm.eps)
    return [
        Statistics(mean=each, variance=of_each, elements=elements)
        for each, of_each in zip(mean.unbind(), variance.unbind(), strict=True)
    ]


def scale_and_shift(norm: nn.GroupNorm, rows: Sequence[Sequence[Statistics]]) -> tuple[Tensor, Tensor]:
    """Return the norm's factor and addend, float32 [rows, channels, 1, 1], from the parts of each row's whole map."""
    parts = max(map(len, rows))
    # Rows with fewer parts than others repeat their first one, with weight 0.
    padded = [part for row in rows for part in [*row, *[row[0]] * (parts - len(row))]]
    means = torch.stack([part.mean for part in padded]).view(len(rows), parts, -1)
    variances = torch.stack([part.variance for part in padded]).view(len(rows), parts, -1)
    weights = _weights(tuple(tuple(part.elements for part in row) for row in rows), means.device)
    mean = (means * weights).sum(dim=1)
    centred = means - mean[:, None]
    variance = (torch.addcmul(variances, centred, centred) * weights).sum(dim=1)
    channels = norm.num_groups, norm.num_channels // norm.num_groups
    scale = (variance + norm.eps).rsqrt()[:, :, None] * norm.weight.float().view(channels)
    shift = torch.addcmul(norm.bias.float().view(channels), mean[:, :, None], scale, value=-1)
    shape = len(rows), norm.num_channels, 1, 1
    return scale.view(shape), shift.view(shape)


@functools.lru_cache(maxsize=_KNOWN_WEIGHTS)
def _weights(elements: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return each part's share of the whole map: float32 [rows, parts, 1]."""
    parts = max(map(len, elements))
    shares = [[each / sum(row) for each in row] + [0.0] * (parts - len(row)) for row in elements]
    return open_device(device).to_device(torch.tensor(shares)[:, :, None])


def scaled(tiles: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Apply each tile's scale and shift to [tiles, channels, height, width], in the tiles' dtype."""
    return torch.addcmul(shift, tiles.float(), scale).to(tiles.dtype)


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
        """Add each row of `addends`, [rows, channels], to all elements of the same row of the maps."""
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
