"""Chooses which blocks of a model to record, if the recording of an image has a byte budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockValue:
    """The time that recording a block saves, and the bytes that it takes."""

    name: str
    saved_s: float
    """Seconds that an edit saves by using the block's recorded output."""
    size_bytes: int
    """Bytes of the recorded output."""


def choose(blocks: Iterable[BlockValue], budget_bytes: int | None) -> frozenset[str]:
    """Return the names of the blocks to record: those that save the most seconds per byte, as far as they fit.

    A block that saves nothing is never recorded. A block that does not fit is skipped, and later ones may fit. For
    blocks of one size, or small ones, this is the optimum. In general it saves at least half of the optimum, because
    the most valuable block is recorded alone if that is better.

    Args:
        budget_bytes: Maximum bytes of all blocks together; None for no limit.
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
