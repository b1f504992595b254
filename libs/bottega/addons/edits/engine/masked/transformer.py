"""Transformer blocks that compute only some tokens, which attend to all tokens of their row (InstGenIE).

The keys and values of cross-attention depend only on the prompt, so they are the same at every step and kept:
projecting the prompt in each step would take a sixth of a transformer's time if few tokens are computed.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor

from bottega.addons.edits.engine.masked.feature_maps import PackedTokens, TokensIn
from bottega.addons.edits.engine.masked.self_attention import MaskedTokens, packed_input
from bottega.addons.edits.engine.masked.tokens import MaskedActivations, adjacent
from bottega.device.memory_plan import MemoryPlan
from bottega.model.backbone import PromptOrigin
from bottega.model.joint_blocks import ProjectedTokens, ProjectionLayers, RowLayout, attend

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


class MaskedTransformer:
    """The blocks of one Transformer2DModel. Names of recorded outputs begin with `path`, the module's path."""

    def __init__(self, transformer: Transformer2DModel, path: str) -> None:
        self.module = transformer
        self._blocks: Sequence[BasicTransformerBlock] = list(transformer.transformer_blocks)
        self._paths = [f"{path}.transformer_blocks.{index}" for index in range(len(self._blocks))]
        # Only the output projection reads the last block, so it is recorded behind the projection.
        self.names = [*self._paths[:-1], f"{path}.proj_out"]
        """Names of recorded outputs, one for each block."""

    def run(self, tokens: TokensIn, size: tuple[int, int], forward: MaskedActivations) -> PackedTokens:
        """Run the blocks. A row that lacks the recorded output of one block computes all tokens of that block.

        `size` is height and width in tokens.
        """
        made: PackedTokens | None = None
        for place, block in enumerate(self._blocks):
            recorded = forward.recorded(self.names[place])
            masked = [rest is not None for rest in recorded]
            packing = forward.packing(size, masked)
            if not place:
                made = packed_input(tokens, masked, packing)
            start = MaskedTokens(
                before=self.names[place - 1],
                size=size,
                made=made,
                whole=None if place else tokens.whole,
                packing=packing,
                forward=forward,
            )
            layers = ProjectionLayers.of_picture(block.attn1)
            started = start.start({self._paths[place]: layers}, partial(_normed, block))
            (attended,) = attend(started.projected, layers.heads)
            items = self._behind_attention(place, started.tokens, attended, packing.layout, forward)
            made = PackedTokens(items=items, packing=packing, recorded=recorded)
        assert made is not None, "a transformer has a block"
        return made

    def _behind_attention(
        self, place: int, items: Tensor, attended: Tensor, layout: RowLayout, forward: MaskedActivations
    ) -> Tensor:
        """Run a block from its self-attention on, whose output is `attended`. Both are [tokens, channels]."""
        block = self._blocks[place]
        cross = block.attn2
        items = items + layout.run(block.attn1.to_out[0], attended)
        keys, values = project(cross, self._paths[place], forward.context, forward.prompts)
        prompt = ProjectedTokens(
            queries=layout.run(cross.to_q, block.norm2(items)),
            keys=keys.flatten(0, 1),
            values=values.flatten(0, 1),
            query_layout=layout,
            key_layout=layout.aligned(keys.shape[1]),
        )
        (attended,) = attend([prompt], cross.heads)
        items += layout.run(cross.to_out[0], attended)
        items += layout.run(block.ff, block.norm3(items))
        return items


def _normed(block: BasicTransformerBlock, items: Tensor, _layout: RowLayout) -> tuple[Tensor]:
    return (block.norm1(items),)
