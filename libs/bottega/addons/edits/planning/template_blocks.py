"""Chooses which blocks of a model are worth recording, if a template has a byte budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockValue:
    """The benefit and the cost of recording a block."""

    name: str
    saved_s: float
    """Seconds that an edit saves by using the block's recorded output."""
    size_bytes: int
    """Size of that output."""


def choose(blocks: Iterable[BlockValue], budget_bytes: int | None) -> frozenset[str]:
    """Return the names of the blocks to record: the most seconds saved per byte, as far as they fit into the budget.

    A block that saves nothing is never recorded, and a block that does not fit leaves its room to later ones. For
    blocks of one size, or small ones, this is the optimum. In general it saves at least half of the optimum, because
    the most valuable block is used alone if that is better.

    Args:
        budget_bytes: For all blocks together; None for no bound.
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
