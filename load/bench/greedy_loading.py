"""InstGenIE's Algorithm 1, which decides block by block what to load: a baseline of the suite's plan.

It goes through the blocks in their order. Each takes what was recorded if it ends no later so than computed in full,
with what was decided before; nobody asks what its load costs those behind it. With small masks and loads as long as
computing in full, every block takes and waits: twice the best.
"""

from __future__ import annotations

from collections.abc import Sequence

from bottega.addons.edits.planning.block_loading import BlockCost


def decide_one_by_one(steps: Sequence[Sequence[BlockCost]], *, load_busy_s: float = 0.0) -> list[bool]:
    """By block, of all steps, whether it takes what was recorded. load_busy_s: see `bottega.planning.plan_steps`."""
    compute_s, load_s, takes = 0.0, load_busy_s, []
    for block in (block for blocks in steps for block in blocks):
        here_s = load_s + block.load_s if block.load_s > 0.0 else block.ready_s
        full_end_s, masked_end_s = compute_s + block.full_s, max(compute_s, here_s) + block.masked_s
        takes.append(masked_end_s <= full_end_s)
        if takes[-1]:
            load_s += block.load_s
        compute_s = min(full_end_s, masked_end_s)
    return takes
