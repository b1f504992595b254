"""Keys and values of tokens that are not computed, from one edit of a template to the next.

What a block attends to follows from the recording alone where a token is not computed: the same weights, of what the
block before has put out. Of a transformer's first block that is the recorded input, where there is one: convolutions in
full mix what is computed into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from bottega.diffusion.editing.masked.feature_maps import PackedTokens
from bottega.diffusion.editing.masked.packing import Packing
from bottega.diffusion.editing.masked.rows import MaskedActivations
from bottega.diffusion.editing.masked.tokens import TokenSet
from bottega.diffusion.rows import KeptProjections, Projections

# Rows of a guided request.
_HALVES = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowProjections:
    """By row [tokens, channels], what packed keys and values are merged into; None for rows that are computed whole."""

    keys: Sequence[Tensor | None]
    values: Sequence[Tensor | None]


def kept_projections(
    path: str, size: tuple[int, int], made: PackedTokens | None, packing: Packing, forward: MaskedActivations
) -> RowProjections | None:
    """Those of a block for all rows of a forward; None where one of them needs all of its tokens projected.

    size: height and width in tokens. made: by the block before; the input, of the first one. packing: of its
    items. A row that records what the block before puts out needs all of that, too.
    """
    if made is None or made.packing is not packing or any(edit and edit.sink for edit in forward.edits):
        return None
    rows: list[Projections | None] = []
    for masked, store in zip(made.recorded, _stores(size, made, forward), strict=True):
        found = store[1].get(path) if store is not None else None
        if masked is not None and (store is None or found is None or found.unknown & ~store[0].bits):
            return None
        rows.append(found)
    if not any(rows):
        return None
    return RowProjections(
        keys=[None if each is None else each.keys for each in rows],
        values=[None if each is None else each.values for each in rows],
    )


def keep_projections(
    path: str,
    size: tuple[int, int],
    made: PackedTokens | None,
    projected: tuple[Tensor, Tensor],
    forward: MaskedActivations,
) -> None:
    """Keeps what follows from recordings of a block's keys and values, [rows, tokens, channels] each."""
    if made is None:
        return
    size_bytes = sum(each[0].nbytes for each in projected)
    stores = [
        store if store is not None and store[1].has_room(path, size_bytes) else None
        for store in _stores(size, made, forward)
    ]
    if not any(stores):
        return
    # Copies, as a group's tensors are as large as the group; of a lone request's halves in one piece, so that they are
    # merged by one copy.
    lone = len(stores) <= _HALVES
    copies = [each.clone() if lone else each for each in projected]
    for store, keys, values in zip(stores, *copies, strict=True):
        if store is None:
            continue
        computed, kept = store
        before = kept.get(path)
        found = Projections(
            keys=keys if lone else keys.clone(), values=values if lone else values.clone(), unknown=computed.bits
        )
        if before is not None:
            # What an earlier edit did not compute is known of its tokens, whatever this one has in their place.
            inside = computed.mask.flatten()
            found.keys[inside], found.values[inside] = before.keys[inside], before.values[inside]
            found = replace(found, unknown=computed.bits & before.unknown)
        kept.put(path, found)


def _stores(
    size: tuple[int, int], made: PackedTokens, forward: MaskedActivations
) -> Iterator[tuple[TokenSet, KeptProjections] | None]:
    """By row, which tokens are computed, and where projections of the others are; None for a row of which the block
    before has taken nothing, or of which none are kept."""
    for row, rest in enumerate(made.recorded):
        edit, tokens = forward.edits[row], forward.tokens_of(row)
        if rest is None or tokens is None or edit is None or edit.recorded is None or edit.recorded.projections is None:
            yield None
        else:
            yield tokens.at(*size), edit.recorded.projections
