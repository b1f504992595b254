"""How a transformer block of masked rows begins: which tokens its self-attention reads, and which it projects.

Each layer is called once with the computed tokens of all rows, so that LoRAs apply whether they are merged into the
weights or added by hooks. Attention is computed row by row. Keys and values that depend only on recordings may be
cached for later edits of the template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.nn import functional

from bottega.addons.edits.engine.activations import KeptProjections, Projections
from bottega.addons.edits.engine.masked.feature_maps import PackedTokens, TokensIn
from bottega.addons.edits.engine.masked.tokens import MaskedActivations, Packing, TokenSet

# Rows of a guided request.
_HALVES = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockStart:
    """The part of a transformer block before its self-attention."""

    before: str
    """Name of the recorded output of the block before."""
    size: tuple[int, int]
    """Height and width in tokens."""
    attentions: Mapping[str, Attention]
    """The block's self-attentions, by the names under which their keys and values are cached."""
    norm: Callable[[Tensor, Packing | None], Sequence[Tensor]]
    """Returns the input of each self-attention, for whole tensors or for the items of a packing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projected:
    """The projections that a self-attention reads."""

    queries: Tensor
    """Of the computed tokens, [items, channels]."""
    keys: Tensor
    """Of all tokens, [rows, tokens, channels], like the values."""
    values: Tensor


def project_block(
    start: BlockStart, made: PackedTokens | None, whole: Tensor | None, packing: Packing, forward: MaskedActivations
) -> tuple[Tensor, Sequence[Projected]]:
    """Return the computed tokens of a block's input, [items, channels], and the projections of each self-attention.

    Without cached keys and values, all tokens are projected from the recorded output of the block before.

    Args:
        made: Output of the block before, or the first block's input; None if tokens outside masks are not recorded.
        whole: The input with all tokens, [rows, tokens, channels]; None to merge it from `made`.
        packing: The packing of the tokens that the block computes.
    """
    kept = [kept_projections(name, start.size, made, packing, forward) for name in start.attentions]
    rows = [each for each in kept if each is not None]
    if made is not None and len(rows) == len(kept):
        inputs = start.norm(made.items, packing)
        return made.items, [
            _project_items(attention, normed, each, packing, forward)
            for attention, normed, each in zip(start.attentions.values(), inputs, rows, strict=True)
        ]
    if whole is None:
        assert made is not None, "a block has an input"
        whole = made.packing.merge(made.items, made.recorded)
        forward.put(start.before, whole)
    projected = []
    for attention, normed in zip(start.attentions.values(), start.norm(whole, None), strict=True):
        keys, values = normed_heads(attention.norm_k, attention.to_k(normed), attention.heads), attention.to_v(normed)
        queries = _queries(attention, packing.pack(normed), packing, forward)
        projected.append(Projected(queries=queries, keys=keys, values=values))
    keep_projections(start, made, projected, forward)
    return made.items if made is not None and made.packing is packing else packing.pack(whole), projected


def _project_items(
    attention: Attention, normed: Tensor, kept: RowProjections, packing: Packing, forward: MaskedActivations
) -> Projected:
    """Project computed tokens only, and merge them with cached keys and values."""
    keys = normed_heads(attention.norm_k, on_items(attention.to_k, normed, packing, forward), attention.heads)
    values = on_items(attention.to_v, normed, packing, forward)
    return Projected(
        queries=_queries(attention, normed, packing, forward),
        keys=packing.merge(keys, kept.keys),
        values=packing.merge(values, kept.values),
    )


def _queries(attention: Attention, normed: Tensor, packing: Packing, forward: MaskedActivations) -> Tensor:
    return normed_heads(attention.norm_q, on_items(attention.to_q, normed, packing, forward), attention.heads)


def normed_heads(norm: nn.Module | None, projected: Tensor, heads: int) -> Tensor:
    """Apply an attention's norm to each head of queries or keys, [..., channels]; None is no norm."""
    if norm is None:
        return projected
    normed: Tensor = norm(projected.reshape(*projected.shape[:-1], heads, -1))
    return normed.flatten(-2)


def attend(queries: Tensor, keys: Tensor, values: Tensor, packing: Packing, *, heads: int) -> Tensor:
    """Compute the attention of each row's items to all tokens of the row: [items, channels].

    `queries` is [items, channels]; `keys` and `values` are [rows, length, channels].
    """
    nothing = queries.new_empty(packing.rows, 0, queries.shape[-1])
    return attend_jointly(queries, nothing, keys, values, packing, heads=heads)[0]


def attend_jointly(
    queries: Tensor, others: Tensor, keys: Tensor, values: Tensor, packing: Packing, *, heads: int
) -> tuple[Tensor, Tensor]:
    """Compute the attention of each row's items, and of further tokens that every row computes.

    Args:
        queries: [items, channels].
        others: Queries of the further tokens, [rows, count, channels].
        keys: Of all tokens, [rows, length, channels], like the values.
        values: See `keys`.

    Returns:
        The attention of both, in the shapes of their queries.
    """
    made: list[Tensor] = []
    beside: list[Tensor] = []
    for run in packing.runs:
        count, rows = run.count, slice(run.first, run.last)
        if not count + others.shape[1]:
            continue  # No tokens of these rows are computed.
        span = slice(packing.offsets[run.first], packing.offsets[run.last])
        asked = queries[span].view(run.last - run.first, count, queries.shape[-1])
        if others.shape[1]:
            asked = torch.cat([asked, others[rows]], dim=1)
        attended = functional.scaled_dot_product_attention(
            _by_head(asked, heads), _by_head(keys[rows], heads), _by_head(values[rows], heads)
        )
        attended = attended.transpose(1, 2).flatten(2)
        made.append(attended[:, :count].flatten(0, 1))
        beside.append(attended[:, count:])
    return _joined(made, queries), _joined(beside, others)


def on_items(layer: nn.Module, items: Tensor, packing: Packing, forward: MaskedActivations) -> Tensor:
    """Apply a layer to the items of all rows."""
    with forward.spans.packed(packing.offsets):
        made: Tensor = layer(items)
    return made


def packed_input(tokens: TokensIn, masked: Sequence[bool], packing: Packing) -> PackedTokens | None:
    """Return the first block's input as packed tokens; None if tokens outside the mask differ from the recording."""
    pairs = list(zip(masked, tokens.as_recorded, strict=True))
    if not any(masked) or (True, False) in pairs:
        return None
    recorded = [row if reads else None for row, reads in zip(tokens.whole, masked, strict=True)]
    return PackedTokens(items=packing.pack(tokens.whole), packing=packing, recorded=recorded)


def _joined(parts: Sequence[Tensor], empty_like: Tensor) -> Tensor:
    """Concatenate parts over dimension 0. Without any, the result is empty, as `empty_like` is then."""
    if not parts:
        return torch.empty_like(empty_like)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    """Reshape [rows, length, channels] to [rows, heads, length, channels per head]."""
    rows, length, channels = tensor.shape
    return tensor.view(rows, length, heads, channels // heads).transpose(1, 2)


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
    start: BlockStart, made: PackedTokens | None, projected: Sequence[Projected], forward: MaskedActivations
) -> None:
    """Cache a block's keys and values that depend only on recordings, for later edits of the template.

    They belong to the tokens that were not computed, and are the same weights applied to the recorded output of the
    block before. A transformer's first block uses its recorded input instead, if there is one, because whole
    convolutions mix computed elements into it. Those of all the block's attentions are cached, or of none, because
    they are only read together.
    """
    if made is None:
        return
    pairs = {name: (each.keys, each.values) for name, each in zip(start.attentions, projected, strict=True)}
    sizes_bytes = {name: keys[0].nbytes + values[0].nbytes for name, (keys, values) in pairs.items()}
    stores = [
        store if store is not None and store[1].has_room(sizes_bytes) else None
        for store in _stores(start.size, made, forward)
    ]
    if not any(stores):
        return
    # Copied, because a view would keep the whole group's tensor alive. Both halves of a lone request are one piece, so
    # that one copy merges them.
    lone = len(stores) <= _HALVES
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
