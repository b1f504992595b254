"""Which blocks of a model are worth recording, where a template may take so many bytes and no more."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockValue:
    """saved_s: what an edit saves that takes what was recorded of a block. size_bytes: that this takes."""

    name: str
    saved_s: float
    size_bytes: int


def choose(blocks: Iterable[BlockValue], budget_bytes: int | None) -> frozenset[str]:
    """The names of those to be recorded: the most seconds saved per byte, as far as there is room for them.

    budget_bytes: for all of them together; None is without bound. A block that saves nothing is never recorded, and one
    that has no room leaves it to those behind it. Of one size, or with small blocks, nothing saves more within the
    budget; in general at least half of the most, as the block that saves most is taken alone where that is better.
    """
    useful = sorted((block for block in blocks if block.saved_s > 0.0), key=_density, reverse=True)
    room = math.inf if budget_bytes is None else budget_bytes
    fitting = [block for block in useful if block.size_bytes <= room]
    chosen = []
    for block in fitting:
        if block.size_bytes <= room:
            chosen.append(block)
            room -= block.size_bytes
    best = max(fitting, key=lambda block: block.saved_s, default=None)
    if best is not None and best.saved_s > sum(block.saved_s for block in chosen):
        chosen = [best]
    return frozenset(block.name for block in chosen)


def _density(block: BlockValue) -> float:
    return block.saved_s / block.size_bytes if block.size_bytes else math.inf
