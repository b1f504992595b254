"""Keys and values of cross-attention, kept from step to step: they are of a request's prompt alone, which stays.

Where few tokens are computed, projecting the prompt again in each step would take a sixth of a transformer's time.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor

from bottega.diffusion.device.memory_plan import MemoryPlan
from bottega.diffusion.editing.masked.packing import adjacent
from bottega.diffusion.model.backbone import PromptOrigin

# Of SDXL in half precision a prompt's projections are 25 MB: twenty of them. Those in use stay while they are.
_BUDGET_BYTES = 512 << 20
# As others read it who find no room.
_HOLDER = "prompts of edits"
# Of a device's memory that nothing else has been promised when the first edit comes; pictures need the rest.
_MEMORY_SHARE = 0.1
# Rows of a guided request.
_HALVES = 2


@dataclass(slots=True, eq=False)
class PromptProjections:
    """Of one prompt, with one set of LoRAs. layers: keys and values [tokens, channels], by the path of a block."""

    prompt: weakref.ref[Tensor]
    layers: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    size_bytes: int = 0

    def keep(self, path: str, keys: Tensor, values: Tensor) -> None:
        """Of a block."""
        if path not in self.layers:  # two rows may have one prompt
            self.layers[path] = keys, values
            self.size_bytes += keys.nbytes + values.nbytes


class PromptCache:
    """The projections of prompts in use, least recently used first; those of prompts that are gone go with them.

    memory: where room for them is set aside when the first are asked for, for good: what is kept of prompts that are
    gone is found out only when the next ones are asked for.
    """

    def __init__(self, budget_bytes: int = _BUDGET_BYTES, memory: MemoryPlan | None = None) -> None:
        self._budget_bytes = budget_bytes
        self._memory: MemoryPlan | None = memory or MemoryPlan()
        self._entries: OrderedDict[tuple[int, Hashable], PromptProjections] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """Of all that is kept."""
        return sum(entry.size_bytes for entry in self._entries.values())

    def of(self, origins: Sequence[PromptOrigin]) -> list[PromptProjections]:
        """By row; what was not known is empty, to be filled while the row is computed."""
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
    """Keys and values [rows, tokens, channels] of a cross-attention. known: by row; empty where nothing is kept."""
    kept = [each.layers.get(path) for each in known]
    rows = [each for each in kept if each is not None]
    if known and len(rows) == len(kept):
        return _side_by_side([keys for keys, _ in rows]), _side_by_side([values for _, values in rows])
    keys, values = attention.to_k(context), attention.to_v(context)
    for first in range(0, len(known), _HALVES):
        # Copies, because a group's tensors are as large as the group; of both halves of a request in one piece.
        pair = slice(first, first + _HALVES)
        copies = zip(known[pair], keys[pair].clone(), values[pair].clone(), strict=True)
        for each, of_keys, of_values in copies:
            each.keep(path, of_keys, of_values)
    return keys, values


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """[rows, ...]: without a copy where they lie in memory as they are wanted, as a lone request's halves do."""
    joined = adjacent(rows)
    return torch.stack(list(rows)) if joined is None else joined
