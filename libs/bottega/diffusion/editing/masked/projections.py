"""Self-attention keys and values of tokens that are not computed, kept from one edit of a template to the next.

They depend only on the recording: the same weights are applied to the recorded output of the block before. A
transformer's first block uses its recorded input instead, if there is one; full convolutions mix computed elements into
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from bottega.diffusion.editing.activations import KeptProjections, Projections
from bottega.diffusion.editing.masked.feature_maps import PackedTokens
from bottega.diffusion.editing.masked.packing import Packing
from bottega.diffusion.editing.masked.rows import MaskedActivations
from bottega.diffusion.editing.masked.tokens import TokenSet

# Rows of a guided request.
_HALVES = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowProjections:
    """The recorded tensor of each row, [tokens, channels], or None for a row that is computed in full."""

    keys: Sequence[Tensor | None]
    values: Sequence[Tensor | None]


def kept_projections(
    path: str, size: tuple[int, int], made: PackedTokens | None, packing: Packing, forward: MaskedActivations
) -> RowProjections | None:
    """Return a block's kept projections for all rows, or None if any row needs all of its tokens projected.

    Rows that record the output of the block before also need all tokens. `made` is that output, or the first block's
    input; `packing` is that of the block's items.
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
    """Keep those of a block's keys and values, [rows, tokens, channels] each, that depend only on recordings."""
    if made is None:
        return
    size_bytes = sum(each[0].nbytes for each in projected)
    stores = [
        store if store is not None and store[1].has_room(path, size_bytes) else None
        for store in _stores(size, made, forward)
    ]
    if not any(stores):
        return
    # Copied, because a view would keep the whole group's tensor alive. Both halves of a lone request are one piece, so
    # that one copy merges them.
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
            # Tokens that an earlier edit did not compute keep its values.
            inside = computed.mask.flatten()
            found.keys[inside], found.values[inside] = before.keys[inside], before.values[inside]
            found = replace(found, unknown=computed.bits & before.unknown)
        kept.put(path, found)


def _stores(
    size: tuple[int, int], made: PackedTokens, forward: MaskedActivations
) -> Iterator[tuple[TokenSet, KeptProjections] | None]:
    """Yield each row's computed tokens and the kept projections of the others; None for a row without these."""
    for row, rest in enumerate(made.recorded):
        edit, tokens = forward.edits[row], forward.tokens_of(row)
        if rest is None or tokens is None or edit is None or edit.recorded is None or edit.recorded.projections is None:
            yield None
        else:
            yield tokens.at(*size), edit.recorded.projections
