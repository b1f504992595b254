"""Chooses which blocks of a template are recorded if all of them would exceed its budget."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.diffusion.editing.masked.work import BlockWork
from bottega.planning.template_blocks import BlockValue, choose
from bottega.v1.activations_pb2 import BlockProfile

# Share of the tokens that a typical edit computes, by which blocks are valued: the production traces of InstGenIE
# (2025) have masks of .11, .19 and .35 on average.
TYPICAL_SHARE = 0.2


def kept_names(
    blocks: Sequence[BlockWork], *, budget_bytes: int, forwards: int, profile: BlockProfile | None = None
) -> frozenset[str] | None:
    """Return the names whose outputs are recorded, or None to record all. They are the same in every forward.

    Blocks are ranked by the seconds that they save per byte: as measured, or else in proportion to their floating-point
    operations. `budget_bytes` is for all forwards together; 0 is no bound.
    """
    forward_budget_bytes = budget_bytes // max(1, forwards)
    if not budget_bytes or sum(block.size_bytes for block in blocks) <= forward_budget_bytes:
        return None
    measured = _saved_s(profile) if profile is not None else {}
    if not measured.keys() >= {block.name for block in blocks}:
        measured = {block.name: block.flops - block.flops_at(TYPICAL_SHARE) for block in blocks}
    values = [
        BlockValue(name=block.name, saved_s=measured[block.name], size_bytes=block.size_bytes) for block in blocks
    ]
    chosen = choose(values, forward_budget_bytes)
    return frozenset(name for block in blocks if block.name in chosen for name in block.names)


def _saved_s(profile: BlockProfile) -> dict[str, float]:
    """Return the seconds that each block saves, by name, at the measured share nearest to the typical one."""
    if not len(profile.shares):
        return {}
    place = min(range(len(profile.shares)), key=lambda place: abs(profile.shares[place] - TYPICAL_SHARE))
    return {block.name: block.full_s - block.masked_s[place] for block in profile.blocks if place < len(block.masked_s)}
