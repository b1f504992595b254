"""How a transformer block of masked rows begins: which tokens its self-attention reads, and which it projects.

Each layer is called once with the computed tokens of all rows, so that LoRAs apply whether they are merged into the
weights or added by hooks. Attention is computed row by row. Keys and values that depend only on recordings may be
cached for later edits of the template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from bottega.addons.edits.engine.activations import KeptProjections, Projections
from bottega.addons.edits.engine.masked.feature_maps import PackedTokens, TokensIn
from bottega.addons.edits.engine.masked.tokens import MaskedActivations, Packing, TokenSet
from bottega.model.joint_blocks import BlockInputs, Norm, ProjectedTokens, ProjectionLayers, Rotary, RowLayout

# Rows of a guided request.
_HALVES = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskedTokens:
    """The tokens of the picture before a block that computes only the tokens under the masks."""

    before: str
    """Name of the recorded output of the block before."""
    size: tuple[int, int]
    """Height and width in tokens."""
    made: PackedTokens | None
    """Output of the previous block, or the first block's input; None if tokens outside masks are not recorded."""
    whole: Tensor | None
    """The block's input with all tokens, [rows, tokens, channels]; None to merge it from `made`."""
    packing: Packing
    """The tokens that the block computes."""
    forward: MaskedActivations
    rotary: Rotary | None = None
    """Rotary embedding of all tokens of all rows; None if the network adds positions to its input."""

    @property
    def layout(self) -> RowLayout:
        """The tokens that the block computes."""
        return self.packing.layout

    def start(self, attentions: Mapping[str, ProjectionLayers], norm: Norm) -> BlockInputs:
        """Norm and project the tokens for the block's self-attentions; `attentions` has their layers by name.

        Keys and values of tokens outside masks come from the cache. If they are not cached, all tokens are projected,
        from the recorded output of the previous block.
        """
        kept = [kept_projections(name, self.size, self.made, self.packing, self.forward) for name in attentions]
        rows = [each for each in kept if each is not None]
        if self.made is not None and len(rows) == len(kept):
            items = self.made.items
            normed = norm(items, self.layout)
            projected: Sequence[ProjectedTokens] = [
                self._project_items(layers, of_items, of_rows)
                for layers, of_items, of_rows in zip(attentions.values(), normed, rows, strict=True)
            ]
        else:
            whole = self._merged()
            made = self.made
            items = made.items if made is not None and made.packing is self.packing else self.packing.pack(whole)
            normed, projected = self._project_whole(attentions, norm, whole)
            keep_projections(list(attentions), self.size, made, projected, self.forward)
        return BlockInputs(tokens=items, normed=normed, projected=projected)

    def _project_items(self, layers: ProjectionLayers, normed: Tensor, kept: RowProjections) -> ProjectedTokens:
        """Project only the computed tokens, and merge their keys and values with the cached ones."""
        packing, rotary = self.packing, self._rotary_of_items()
        keys = packing.merge(layers.keys(normed, self.layout, rotary), kept.keys)
        values = packing.merge(layers.values(normed, self.layout), kept.values)
        return ProjectedTokens(
            queries=layers.queries(normed, self.layout, rotary),
            keys=keys.flatten(0, 1),
            values=values.flatten(0, 1),
            query_layout=self.layout,
            key_layout=self.layout.aligned(packing.tokens),
        )

    def _project_whole(
        self, attentions: Mapping[str, ProjectionLayers], norm: Norm, whole: Tensor
    ) -> tuple[Sequence[Tensor], Sequence[ProjectedTokens]]:
        """Project all tokens. Return the norm's outputs for the computed tokens, and the projections."""
        everything, rotary = self.layout.aligned(self.packing.tokens), self._rotary_of_items()
        computed, projected = [], []
        for layers, normed in zip(attentions.values(), norm(whole.flatten(0, 1), everything), strict=True):
            items = self.packing.pack(normed.view(self.packing.rows, self.packing.tokens, -1))
            computed.append(items)
            projected.append(
                ProjectedTokens(
                    queries=layers.queries(items, self.layout, rotary),
                    keys=layers.keys(normed, everything, self.rotary),
                    values=layers.values(normed, everything),
                    query_layout=self.layout,
                    key_layout=everything,
                )
            )
        return computed, projected

    def _merged(self) -> Tensor:
        """Return the block's input with all tokens."""
        if self.whole is not None:
            return self.whole
        assert self.made is not None, "a block has an input"
        whole = self.made.packing.merge(self.made.items, self.made.recorded)
        self.forward.put(self.before, whole)
        return whole

    def _rotary_of_items(self) -> Rotary | None:
        """Return the rotary embedding of the computed tokens."""
        index = self.packing.index
        if self.rotary is None or index is None:
            return self.rotary
        cosines, sines = self.rotary
        return cosines.index_select(0, index), sines.index_select(0, index)


def packed_input(tokens: TokensIn, masked: Sequence[bool], packing: Packing) -> PackedTokens | None:
    """Return the first block's input as packed tokens; None if tokens outside the mask differ from the recording."""
    pairs = list(zip(masked, tokens.as_recorded, strict=True))
    if not any(masked) or (True, False) in pairs:
        return None
    recorded = [row if reads else None for row, reads in zip(tokens.whole, masked, strict=True)]
    return PackedTokens(items=packing.pack(tokens.whole), packing=packing, recorded=recorded)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowProjections:
    """Keys and values of each row, [tokens, channels]; None for a row that computes all tokens."""

    keys: Sequence[Tensor | None]
    values: Sequence[Tensor | None]


def kept_projections(
    path: str, size: tuple[int, int], made: PackedTokens | None, packing: Packing, forward: MaskedActivations
) -> RowProjections | None:
    """Return a block's cached keys and values for all rows; None if any row needs all of its tokens projected.

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
    names: Sequence[str],
    size: tuple[int, int],
    made: PackedTokens | None,
    projected: Sequence[ProjectedTokens],
    forward: MaskedActivations,
) -> None:
    """Cache a block's keys and values that depend only on recordings, for later edits of the template.

    Only keys and values of tokens that were not computed are cached. They are projections of the recorded output of the
    previous block. A transformer's first block projects its recorded input instead, if there is one, because whole
    convolutions mix computed elements into it. The keys and values of all the block's attentions are cached or none
    are, because they are only read together.

    Args:
        names: Names of the block's self-attentions.
        size: Height and width in tokens.
        made: Output of the previous block, or the first block's input.
        projected: Keys and values of all tokens, for each attention.
        forward: The state of the forward pass.
    """
    if made is None:
        return
    stores = list(_stores(size, made, forward))
    rows = len(stores)
    pairs = {
        name: (each.keys.view(rows, -1, each.keys.shape[1]), each.values.view(rows, -1, each.values.shape[1]))
        for name, each in zip(names, projected, strict=True)
    }
    sizes_bytes = {name: keys[0].nbytes + values[0].nbytes for name, (keys, values) in pairs.items()}
    stores = [store if store is not None and store[1].has_room(sizes_bytes) else None for store in stores]
    if not any(stores):
        return
    # Copied, because a view would keep the whole group's tensor alive. Both halves of a lone request are one piece, so
    # that one copy merges them.
    lone = rows <= _HALVES
    if lone:
        pairs = {name: (keys.clone(), values.clone()) for name, (keys, values) in pairs.items()}
    for row, store in enumerate(stores):
        if store is None:
            continue
        computed, kept = store
        found = {}
        for name, (keys, values) in pairs.items():
            of_row = (keys[row], values[row]) if lone else (keys[row].clone(), values[row].clone())
            found[name] = _with_earlier(kept.get(name), of_row, computed)
        kept.put(found)


def _with_earlier(before: Projections | None, projected: tuple[Tensor, Tensor], computed: TokenSet) -> Projections:
    """Return a row's keys and values to cache. Tokens that an earlier edit did not compute keep its values."""
    keys, values = projected
    if before is None:
        return Projections(keys=keys, values=values, unknown=computed.bits)
    inside = computed.mask.flatten()
    keys[inside], values[inside] = before.keys[inside], before.values[inside]
    return Projections(keys=keys, values=values, unknown=computed.bits & before.unknown)


def _stores(
    size: tuple[int, int], made: PackedTokens, forward: MaskedActivations
) -> Iterator[tuple[TokenSet, KeptProjections] | None]:
    """Yield for each row its computed tokens and the cache for the others; None for a row without a cache."""
    for row, rest in enumerate(made.recorded):
        edit, tokens = forward.edits[row], forward.tokens_of(row)
        if rest is None or tokens is None or edit is None or edit.recorded is None or edit.recorded.projections is None:
            yield None
        else:
            yield tokens.at(*size), edit.recorded.projections
