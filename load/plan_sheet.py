"""Draws the plan of one edit, loads over computing, from what a running suite measures of its model's blocks.

`python -m load.plan_sheet FILE`, beside `bottega up --model FOLDER` with a model like that of the benches of edits:
`python -m load.bench.bench_model FOLDER` writes one, `load.bench.edit_model` has its shape. README.md shows the sheet.
The plan is bottega.planning's, as an engine's; how fast recordings are loaded is given, so that loading is what counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import PIL.Image

from bottega.addons.edits.client.cli_profile import HALVES, masked_s, nearest_share
from bottega.addons.edits.planning.block_loading import BlockCost, StepPlan, plan_steps
from bottega.client import BlockProfile, Client
from load.plan_drawing import Bar, PlanSheet, draw_plan

_STEPS = 2
# Seconds to load all recordings of a step for each that its masked part takes to compute: at 1 loading just keeps up.
_SLOWNESS = 1.6


def step_of(profile: BlockProfile, *, share: float, bytes_per_s: float) -> list[BlockCost]:
    """The blocks of one edit's step, both halves of guidance at once. What is in no block is left out: it is little."""
    column = nearest_share(profile, share)
    return [
        BlockCost(
            name=block.name,
            full_s=HALVES * block.full_s,
            masked_s=HALVES * masked_s(block, column),
            load_s=HALVES * block.size_bytes / bytes_per_s,
        )
        for block in profile.blocks
    ]


def in_order(steps: Sequence[Sequence[BlockCost]]) -> float:
    """Seconds of loading all of a step and then computing it."""
    return sum(block.load_s + block.masked_s for blocks in steps for block in blocks)


def pipelined(steps: Sequence[Sequence[BlockCost]]) -> float:
    """Seconds where every block is loaded, and computed as soon as it is there."""
    loaded_s = computed_s = 0.0
    for block in (block for blocks in steps for block in blocks):
        loaded_s += block.load_s
        computed_s = max(computed_s, loaded_s if block.load_s else 0.0) + block.masked_s
    return computed_s


def bytes_per_s(profile: BlockProfile, *, share: float, slowness: float) -> float:
    """How fast loading is at that slowness."""
    column = nearest_share(profile, share)
    computed_s = sum(masked_s(block, column) for block in profile.blocks)
    return sum(block.size_bytes for block in profile.blocks) / (slowness * computed_s)


def sheet_of(profile: BlockProfile, name: str, *, share: float, rate: float) -> PlanSheet:
    """rate: bytes a second that are loaded."""
    steps = [step_of(profile, share=share, bytes_per_s=rate)] * _STEPS
    plans = plan_steps(steps)
    measured = profile.shares[nearest_share(profile, share)]
    step_mb = HALVES * sum(block.size_bytes for block in profile.blocks) / 1e6
    edit = (
        f"One edit of {profile.width}x{profile.height} pixels, {measured:.0%} of them computed, both halves of guidance"
    )
    pace = f"{step_mb:.0f} MB of recordings a step, loaded at {rate / 1e6:.0f} MB/s"
    taken = f"of {len(profile.blocks)} blocks the plan takes {_taken(plans, steps)} from recordings"
    return PlanSheet(
        title="The plan of one edit: recordings are loaded while blocks are computed",
        subtitle=(f"{name}, measured by bottega templates profile.", f"{edit}; {pace};", f"{taken}."),
        steps=steps,
        plans=plans,
        bars=(
            Bar(label="this plan", seconds=plans[-1].compute_s, chosen=True),
            Bar(label="load every block, compute each when it is there", seconds=pipelined(steps)),
            Bar(label="no recordings: every block in full", seconds=sum(b.full_s for each in steps for b in each)),
            Bar(label="load all of a step, then compute it", seconds=in_order(steps)),
        ),
    )


def _taken(plans: Sequence[StepPlan], steps: Sequence[Sequence[BlockCost]]) -> str:
    """Such as "61 and 58", of the blocks that have a recording."""
    counts = [
        sum(taken and block.load_s > 0 for taken, block in zip(plan.takes, blocks, strict=True))
        for plan, blocks in zip(plans, steps, strict=True)
    ]
    return " and ".join(map(str, counts))


def main() -> None:
    """Measures, plans, draws the sheet and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="PNG to write")
    parser.add_argument("--name", default="", help="of the model, as the sheet calls it; default: as it is served")
    parser.add_argument("--share", type=float, default=0.2, help="of the image that is computed (default: %(default)s)")
    parser.add_argument(
        "--slowness",
        type=float,
        default=_SLOWNESS,
        help="seconds of loading all recordings for each second of computing masked parts (default: %(default)s)",
    )
    options = parser.parse_args()
    with Client() as client:
        measured = client.profile_blocks()
    rate = bytes_per_s(measured.profile, share=options.share, slowness=options.slowness)
    sheet = sheet_of(measured.profile, options.name or measured.model, share=options.share, rate=rate)
    draw_plan(sheet).quantize(256, dither=PIL.Image.Dither.NONE).save(options.file, optimize=True)
    print(options.file)


if __name__ == "__main__":
    main()
