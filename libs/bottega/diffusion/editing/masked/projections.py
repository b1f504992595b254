"""Keys and values of tokens that are not computed, from one edit of a template to the next.

Behind a transformer's first block, what a block attends to follows from the recording alone where a token is not
computed: the same weights, of the same outputs. The first block's input does not: convolutions mix what is computed
into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bottega.diffusion.editing.masked.feature_maps import PackedTokens
from bottega.diffusion.editing.masked.packing import Packing
from bottega.diffusion.editing.masked.rows import MaskedActivations
from bottega.diffusion.rows import KeptProjections, Projections


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowProjections:
    """By row [tokens, channels], what packed keys and values are merged into; None for rows that are computed whole."""

    keys: Sequence[Tensor | None]
    values: Sequence[Tensor | None]


def kept_projections(
    path: str, size: tuple[int, int], made: PackedTokens | None, packing: Packing, forward: MaskedActivations
) -> RowProjections | None:
    """Those of a block for all rows of a forward; None where one of them needs all of its tokens projected.

    size: height and width in tokens. made: by the block before. packing: of this block's items. A row that records
    what the block before puts out needs all of that, too.
    """
    if made is None or made.packing is not packing or any(edit and edit.sink for edit in forward.edits):
        return None
    rows: list[Projections | None] = []
    for masked, (computed, kept) in zip(made.recorded, _kept(size, made, forward), strict=True):
        found = kept.get(path) if kept is not None else None
        if masked is not None and (found is None or bool((found.unknown & ~computed).any())):
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
    for (computed, kept), keys, values in zip(_kept(size, made, forward), *projected, strict=True):
        if kept is None:
            continue
        before = kept.get(path)
        found = Projections(keys=keys.clone(), values=values.clone(), unknown=computed)
        if before is not None:
            # What an earlier edit did not compute is known of its tokens, whatever this one has in their place.
            found.keys[computed], found.values[computed] = before.keys[computed], before.values[computed]
            found = replace(found, unknown=computed & before.unknown)
        kept.put(path, found)


def _kept(
    size: tuple[int, int], made: PackedTokens, forward: MaskedActivations
) -> Iterator[tuple[Tensor, KeptProjections | None]]:
    """By row, which tokens are computed, bool [tokens], and where projections of the others are; None for a row of
    which the block before has taken nothing."""
    for row, rest in enumerate(made.recorded):
        edit, tokens = forward.edits[row], forward.tokens_of(row)
        if rest is None or tokens is None or edit is None or edit.recorded is None:
            yield torch.empty(0, dtype=torch.bool), None
        else:
            yield tokens.at(*size).mask.flatten(), edit.recorded.projections
