"""A cache of the keys and values of cross-attention, which depend only on the prompt and so are the same at every step.

Projecting the prompt in each step would take a sixth of a transformer's time if few tokens are computed.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor

from bottega.addons.edits.engine.masked.tokens import adjacent
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
