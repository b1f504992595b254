"""Transformer blocks that compute only some tokens, which attend to all tokens of their row (InstGenIE).

Each layer is called once with the computed tokens of all rows, so that LoRAs apply whether they are merged into the
weights or added by hooks. Attention is computed row by row. The keys and values of cross-attention depend only on the
prompt, so they are the same at every step and kept: projecting the prompt in each step would take a sixth of a
transformer's time if few tokens are computed.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional

from bottega.addons.edits.engine.activations import KeptProjections, Projections
from bottega.addons.edits.engine.masked.feature_maps import PackedTokens, TokensIn
from bottega.addons.edits.engine.masked.tokens import MaskedActivations, Packing, TokenSet, adjacent
from bottega.device.memory_plan import MemoryPlan
from bottega.model.backbone import PromptOrigin

# Room for twenty prompts of SDXL, whose projections take 25 MB in half precision. A running forward holds its own.
_BUDGET_BYTES = 512 << 20
# Name of the reservation, which others see when no memory is left.
_HOLDER = "prompts of edits"
# Share of the device memory that is unreserved when the first edit comes; pictures need the rest.
_MEMORY_SHARE = 0.1
# Rows of a guided request.
_HALVES = 2


@dataclass(slots=True, eq=False)
class PromptProjections:
    """The projections of one prompt with one set of LoRAs."""

    prompt: weakref.ref[Tensor]
    layers: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values [tokens, channels], by the path of a block."""
    size_bytes: int = 0

    def keep(self, path: str, keys: Tensor, values: Tensor) -> None:
        if path not in self.layers:  # Two rows may have the same prompt.
            self.layers[path] = keys, values
            self.size_bytes += keys.nbytes + values.nbytes


class PromptCache:
    """An LRU cache of the projections of prompts in use. An entry is dropped when its prompt is freed.

    Device memory is reserved when the first entry is requested, and stays reserved, because entries of freed prompts
    are only found when the next entries are requested.
    """

    def __init__(self, budget_bytes: int = _BUDGET_BYTES, memory: MemoryPlan | None = None) -> None:
        self._budget_bytes = budget_bytes
        self._memory: MemoryPlan | None = memory or MemoryPlan()
        self._entries: OrderedDict[tuple[int, Hashable], PromptProjections] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self._entries.values())

    def of(self, origins: Sequence[PromptOrigin]) -> list[PromptProjections]:
        """Return the entry for each row. New entries are empty, and are filled while the row is computed."""
        if self._memory is not None:
            self._budget_bytes = self._memory.reserve_up_to(_HOLDER, self._budget_bytes, share=_MEMORY_SHARE)
            self._memory = None
        self._trim()
        found = []
        for prompt, loras in origins:
            key = (id(prompt), loras)
            entry = self._entries.get(key)
            if entry is None or entry.prompt() is not prompt:
                entry = self._entries[key] = PromptProjections(weakref.ref(prompt))
            self._entries.move_to_end(key)
            found.append(entry)
        return found

    def _trim(self) -> None:
        for key in [key for key, entry in self._entries.items() if entry.prompt() is None]:
            del self._entries[key]
        while self.size_bytes > self._budget_bytes:
            self._entries.popitem(last=False)


def project(
    attention: Attention, path: str, context: Tensor, known: Sequence[PromptProjections]
) -> tuple[Tensor, Tensor]:
    """Return keys and values [rows, tokens, channels] of a cross-attention, from the cache or computed."""
    kept = [each.layers.get(path) for each in known]
    rows = [each for each in kept if each is not None]
    if known and len(rows) == len(kept):
        return _side_by_side([keys for keys, _ in rows]), _side_by_side([values for _, values in rows])
    keys, values = attention.to_k(context), attention.to_v(context)
    for first in range(0, len(known), _HALVES):
        # Copied, because a view would keep the whole group's tensor alive; both halves of a request in one piece.
        pair = slice(first, first + _HALVES)
        copies = zip(known[pair], keys[pair].clone(), values[pair].clone(), strict=True)
        for each, of_keys, of_values in copies:
            each.keep(path, of_keys, of_values)
    return keys, values


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows, without a copy if they are adjacent in memory, as both halves of a single request are."""
    joined = adjacent(rows)
    return torch.stack(list(rows)) if joined is None else joined


class Caching(Enum):
    """The tensors of a transformer block that are recorded, for the tokens that are not computed."""

    OUTPUTS = "outputs"
    """The block's output, from which the next block projects keys and values."""
    KEYS_VALUES = "keys_values"
    """The keys and values of the block's self-attention, which take twice the bytes and save their projection."""


class MaskedTransformer:
    """The blocks of one Transformer2DModel. Names of recorded outputs begin with `path`, the module's path."""

    def __init__(self, transformer: Transformer2DModel, path: str, caching: Caching) -> None:
        self.module = transformer
        self._blocks: Sequence[BasicTransformerBlock] = list(transformer.transformer_blocks)
        self._caching = caching
        self._paths = [f"{path}.transformer_blocks.{index}" for index in range(len(self._blocks))]
        # Only the output projection reads the last block, so it is recorded behind the projection.
        self.names = [*self._paths[:-1], f"{path}.proj_out"]
        """Names of recorded outputs, one for each block."""

    def run(self, tokens: TokensIn, size: tuple[int, int], forward: MaskedActivations) -> PackedTokens:
        """Run the blocks. `size` is height and width in tokens."""
        if self._caching is Caching.KEYS_VALUES:
            return self._run_on_keys_values(tokens.whole, size, forward)
        return self._run_on_outputs(tokens, size, forward)

    def _run_on_outputs(self, tokens: TokensIn, size: tuple[int, int], forward: MaskedActivations) -> PackedTokens:
        """Run the blocks where a row that lacks the recorded output of one block computes all tokens of that block."""
        whole = tokens.whole
        made: PackedTokens | None = None
        for place, block in enumerate(self._blocks):
            recorded = forward.recorded(self.names[place])
            masked = [rest is not None for rest in recorded]
            packing = forward.packing(size, masked)
            if not place:
                made = _packed_input(tokens, masked, packing)
            kept = kept_projections(self._paths[place], size, made, packing, forward)
            if made is not None and kept is not None:
                items, normed = made.items, block.norm1(made.items)
                keys = packing.merge(_packed(block.attn1.to_k, normed, packing, forward), kept.keys)
                values = packing.merge(_packed(block.attn1.to_v, normed, packing, forward), kept.values)
            else:
                if made is not None and place:
                    whole = made.packing.merge(made.items, made.recorded)
                    forward.put(self.names[place - 1], whole)
                items = made.items if made is not None and made.packing is packing else packing.pack(whole)
                of_all = block.norm1(whole)
                keys, values = block.attn1.to_k(of_all), block.attn1.to_v(of_all)
                keep_projections(self._paths[place], size, made, (keys, values), forward)
                normed = packing.pack(of_all)
            queries = _packed(block.attn1.to_q, normed, packing, forward)
            attended = attend(queries, keys, values, packing, heads=block.attn1.heads)
            items = self._behind_attention(place, items, attended, packing, forward)
            made = PackedTokens(items=items, packing=packing, recorded=recorded)
        assert made is not None, "a transformer has a block"
        return made

    def _run_on_keys_values(self, whole: Tensor, size: tuple[int, int], forward: MaskedActivations) -> PackedTokens:
        """Run the blocks where a row that lacks keys or values of one block computes all tokens of all blocks."""
        recorded = forward.recorded(self.names[-1])
        keys = [forward.recorded(f"{path}:keys") for path in self._paths]
        values = [forward.recorded(f"{path}:values") for path in self._paths]
        masked = [all(rest is not None for rest in row) for row in zip(recorded, *keys, *values, strict=True)]
        packing = forward.packing(size, masked)
        items = packing.pack(whole)
        for place, (block, path) in enumerate(zip(self._blocks, self._paths, strict=True)):
            normed = block.norm1(items)
            whole_keys = packing.merge(_packed(block.attn1.to_k, normed, packing, forward), _where(keys[place], masked))
            whole_values = packing.merge(
                _packed(block.attn1.to_v, normed, packing, forward), _where(values[place], masked)
            )
            forward.put(f"{path}:keys", whole_keys)
            forward.put(f"{path}:values", whole_values)
            queries = _packed(block.attn1.to_q, normed, packing, forward)
            attended = attend(queries, whole_keys, whole_values, packing, heads=block.attn1.heads)
            items = self._behind_attention(place, items, attended, packing, forward)
        return PackedTokens(items=items, packing=packing, recorded=_where(recorded, masked))

    def _behind_attention(
        self, place: int, items: Tensor, attended: Tensor, packing: Packing, forward: MaskedActivations
    ) -> Tensor:
        """Run a block from its self-attention on, whose output is `attended`. Both are [items, channels]."""
        block = self._blocks[place]
        cross = block.attn2
        items = items + _packed(block.attn1.to_out[0], attended, packing, forward)
        keys, values = project(cross, self._paths[place], forward.context, forward.prompts)
        queries = _packed(cross.to_q, block.norm2(items), packing, forward)
        attended = attend(queries, keys, values, packing, heads=cross.heads)
        items += _packed(cross.to_out[0], attended, packing, forward)
        items += _packed(block.ff, block.norm3(items), packing, forward)
        return items


def attend(queries: Tensor, keys: Tensor, values: Tensor, packing: Packing, *, heads: int) -> Tensor:
    """Compute the attention of each row's items to all tokens of the row: [items, channels].

    `queries` is [items, channels]; `keys` and `values` are [rows, length, channels].
    """
    made: list[Tensor] = []
    for run in packing.runs:
        if not run.count:
            continue  # No tokens of these rows are computed.
        rows, span = run.last - run.first, slice(packing.offsets[run.first], packing.offsets[run.last])
        attended = functional.scaled_dot_product_attention(
            _by_head(queries[span].view(rows, run.count, -1), heads),
            _by_head(keys[run.first : run.last], heads),
            _by_head(values[run.first : run.last], heads),
        )
        made.append(attended.transpose(1, 2).reshape(rows * run.count, -1))
    if not made:
        return torch.empty_like(queries)
    return made[0] if len(made) == 1 else torch.cat(made)


def _packed(layer: nn.Module, items: Tensor, packing: Packing, forward: MaskedActivations) -> Tensor:
    """Apply a layer to the items of all rows."""
    with forward.spans.packed(packing.offsets):
        made: Tensor = layer(items)
    return made


def _packed_input(tokens: TokensIn, masked: Sequence[bool], packing: Packing) -> PackedTokens | None:
    """Return the first block's input as packed tokens; None if tokens outside the mask differ from the recording."""
    pairs = list(zip(masked, tokens.as_recorded, strict=True))
    if not any(masked) or (True, False) in pairs:
        return None
    return PackedTokens(items=packing.pack(tokens.whole), packing=packing, recorded=_where(list(tokens.whole), masked))


def _where(recorded: Sequence[Tensor | None], masked: Sequence[bool]) -> list[Tensor | None]:
    """Return the recorded tensors of masked rows, with None for other rows."""
    return [rest if reads else None for rest, reads in zip(recorded, masked, strict=True)]


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    """Reshape [rows, length, channels] to [rows, heads, length, channels per head]."""
    rows, length, _ = tensor.shape
    return tensor.view(rows, length, heads, -1).transpose(1, 2)


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
    path: str,
    size: tuple[int, int],
    made: PackedTokens | None,
    projected: tuple[Tensor, Tensor],
    forward: MaskedActivations,
) -> None:
    """Cache a block's keys and values that depend only on recordings, for later edits of the template.

    They belong to the tokens that were not computed, and are the same weights applied to the recorded output of the
    block before. A transformer's first block uses its recorded input instead, if there is one, because whole
    convolutions mix computed elements into it.

    Args:
        projected: Keys and values, [rows, tokens, channels] each.
    """
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
    """Yield for each row its computed tokens and the cache for the others; None for a row without a cache."""
    for row, rest in enumerate(made.recorded):
        edit, tokens = forward.edits[row], forward.tokens_of(row)
        if rest is None or tokens is None or edit is None or edit.recorded is None or edit.recorded.projections is None:
            yield None
        else:
            yield tokens.at(*size), edit.recorded.projections
