"""Packs the computed tokens of all rows, so that rows with different masks share a network's layer calls.

"Whole" tensors are [rows, tokens, channels]. Packed ones are [items, channels]: the computed tokens of the first row,
then those of the second, and so on. Padding instead would save nothing as soon as one row computes all tokens, because
all other rows would be padded to its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.addons.edits.engine.masked.tokens import TokenSet
from bottega.device.pick import open_device
from bottega.model.operations import Moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Adjacent rows [first, last) that have `count` items each."""

    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """The computed tokens of each row at one resolution."""

    rows: int
    """Number of rows in whole tensors."""
    tokens: int
    """Number of tokens of each row in whole tensors."""
    offsets: tuple[int, ...]
    runs: tuple[Run, ...]
    """All rows, grouped into runs with equal numbers of items."""
    index: Tensor | None
    """Position of each item among rows * tokens, int64 [items]; None if every token is computed."""
    moves: Moves | None = None
    """Kernels that pack and merge; None for plain torch."""
    slots: Tensor | None = None

    def pack(self, whole: Tensor) -> Tensor:
        """Return the items of a whole tensor."""
        if self.index is not None and self.moves is not None:
            return self.moves.pack(whole, self.index)
        flat = whole.reshape(self.rows * self.tokens, -1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def merge(self, items: Tensor, recorded: Sequence[Tensor | None]) -> Tensor:
        """Return a whole tensor from computed items and the recorded tokens of each row.

        `recorded` has [tokens, channels] of any dtype for each row, or None for rows that compute all tokens.
        """
        if self.index is None:
            return items.view(self.rows, self.tokens, -1)
        if self.moves is not None and self.slots is not None:
            return self.moves.merge(items, self.index, self.slots, recorded, self.tokens)
        whole = items.new_empty(self.rows, self.tokens, items.shape[-1])
        rests = [rest for rest in recorded if rest is not None]
        joined = adjacent(rests) if len(rests) == self.rows else None
        if joined is not None:
            whole.copy_(joined, non_blocking=True)
        else:
            for row, rest in zip(whole, recorded, strict=True):
                if rest is not None:
                    row.copy_(rest, non_blocking=True)
        whole.view(self.rows * self.tokens, -1).index_copy_(0, self.index, items)
        return whole


def pack_rows(
    sets: Sequence[TokenSet | None], tokens: int, device: torch.device, moves: Moves | None = None
) -> Packing:
    """Return the packing of rows with these token sets. None stands for a row that computes all `tokens`."""
    counts = [tokens if each is None else each.count for each in sets]
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    index = slots = None
    if offsets[-1] != len(sets) * tokens:
        everything = torch.arange(tokens)
        places = [row * tokens + (everything if each is None else each.index) for row, each in enumerate(sets)]
        joined = torch.cat(places)
        to_device = open_device(device).to_device
        index = to_device(joined)
        slots = None if moves is None else to_device(_slots(joined, len(sets) * tokens))
    return Packing(
        rows=len(sets),
        tokens=tokens,
        offsets=tuple(offsets),
        runs=tuple(_runs(counts)),
        index=index,
        moves=moves,
        slots=slots,
    )


def adjacent(rows: Sequence[Tensor]) -> Tensor | None:
    """Return tensors of one shape as one view [rows, ...] if they are adjacent in memory; None otherwise."""
    first = rows[0]
    storage, begin, size = first.untyped_storage().data_ptr(), first.storage_offset(), first.numel()
    if not first.is_contiguous():
        return None
    for place, row in enumerate(rows):
        if row.untyped_storage().data_ptr() != storage or row.storage_offset() != begin + place * size:
            return None
    return first.as_strided((len(rows), *first.shape), (size, *first.stride()))


def _slots(index: Tensor, places: int) -> Tensor:
    """Return the index of the item at each position, int32 [places]; -1 where there is none."""
    slots = torch.full((places,), -1, dtype=torch.int32)
    slots[index] = torch.arange(len(index), dtype=torch.int32)
    return slots


def _runs(counts: Sequence[int]) -> Iterator[Run]:
    first = 0
    for row, count in enumerate(counts):
        if row == len(counts) - 1 or counts[row + 1] != count:
            yield Run(first=first, last=row + 1, count=count)
            first = row + 1
