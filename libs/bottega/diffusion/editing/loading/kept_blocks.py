"""Which blocks of a template are recorded, where all of them would take more than a template may."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.diffusion.editing.masked.work import BlockWork
from bottega.planning.template_blocks import BlockValue, choose
from bottega.v1.activations_pb2 import BlockProfile

# Of the tokens, what an edit computes that blocks are valued by: the production traces of InstGenIE (2025) have masks
# of .11, .19 and .35 on average.
TYPICAL_SHARE = 0.2


def kept_names(
    blocks: Sequence[BlockWork], *, budget_bytes: int, forwards: int, profile: BlockProfile | None = None
) -> frozenset[str] | None:
    """Under which names outputs are recorded; None for all. The same ones in each of so many forwards.

    budget_bytes: of all forwards; 0 is without bound. By the seconds per byte that blocks save as they were measured,
    or by their floating-point operations.
    """
    of_each = budget_bytes // max(1, forwards)
    if not budget_bytes or sum(block.size_bytes for block in blocks) <= of_each:
        return None
    measured = _saved_s(profile) if profile is not None else {}
    if not measured.keys() >= {block.name for block in blocks}:
        measured = {block.name: block.flops - block.flops_at(TYPICAL_SHARE) for block in blocks}
    values = [
        BlockValue(name=block.name, saved_s=measured[block.name], size_bytes=block.size_bytes) for block in blocks
    ]
    chosen = choose(values, of_each)
    return frozenset(name for block in blocks if block.name in chosen for name in block.names)


def _saved_s(profile: BlockProfile) -> dict[str, float]:
    """By block, of a row of which about the typical share is computed."""
    if not len(profile.shares):
        return {}
    place = min(range(len(profile.shares)), key=lambda place: abs(profile.shares[place] - TYPICAL_SHARE))
    return {block.name: block.full_s - block.masked_s[place] for block in profile.blocks if place < len(block.masked_s)}
