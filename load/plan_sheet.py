"""A drawing of an edit's plan, loads over computing, by a running suite's measurements of its model's blocks.

Run `python -m load.plan_sheet FILE` beside `bottega up --model FOLDER` with a model like that of the benches of edits:
`python -m load.bench.bench_model FOLDER` writes one, `load.bench.edit_model` has its shape. The README of edits shows
the sheet. The plan is bottega.planning's, as an engine's; the speed of loading is given, so that loading decides.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bottega.addons.edits.client.cli_profile import HALVES, masked_s, nearest_share
from bottega.addons.edits.planning import BlockCost, StepPlan, plan_steps
from bottega.client import BlockProfile, Client

_STEPS = 2
# Seconds to load all recordings of a step for each that its masked part takes to compute: at 1 loading just keeps up.
_SLOWNESS = 1.6
_DPI = 100
WIDTH = 1720
"""Pixels of the sheet."""
_MASKED, _FULL, _WAIT, _OTHER, _ARROW = "#3a9d5d", "#e08a2e", "#dfe3e9", "#c3c9d3", "#bcd3ec"
# Of loads, by step: the stream runs on from one to the next.
_LOADED = ("#4a90d9", "#2c66ad")
_LEGEND = {
    _LOADED[0]: "a block's recording is loaded",
    _MASKED: "its masked part is computed",
    _FULL: "a block is computed in full",
    _WAIT: "computing waits",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A way to do the same, and its time."""

    label: str
    seconds: float
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSheet:
    """Contents of the sheet."""

    title: str
    subtitle: Sequence[str]
    """Lines."""
    steps: Sequence[Sequence[BlockCost]]
    """The blocks of each step."""
    plans: Sequence[StepPlan]
    """The plan of each step."""
    bars: Sequence[Bar]
    """For comparison, of all of the steps."""


def step_of(profile: BlockProfile, *, share: float, bytes_per_s: float) -> list[BlockCost]:
    """Return the blocks of one edit's step, both halves of guidance at once, without the little that is in no block."""
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
    """Return the seconds of loading all of a step and then computing it."""
    return sum(block.load_s + block.masked_s for blocks in steps for block in blocks)


def pipelined(steps: Sequence[Sequence[BlockCost]]) -> float:
    """Return the seconds where every block is loaded, and computed as soon as it is there."""
    loaded_s = computed_s = 0.0
    for block in (block for blocks in steps for block in blocks):
        loaded_s += block.load_s
        computed_s = max(computed_s, loaded_s if block.load_s else 0.0) + block.masked_s
    return computed_s


def bytes_per_s(profile: BlockProfile, *, share: float, slowness: float) -> float:
    """Return the speed of loading at that slowness."""
    column = nearest_share(profile, share)
    computed_s = sum(masked_s(block, column) for block in profile.blocks)
    return sum(block.size_bytes for block in profile.blocks) / (slowness * computed_s)


def sheet_of(profile: BlockProfile, name: str, *, share: float, rate: float) -> PlanSheet:
    """Return the contents of the sheet.

    Args:
        profile: Of the model's blocks.
        name: Of the model.
        share: Of the image that is computed.
        rate: Bytes a second that are loaded.
    """
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
    """Return such as "61 and 58", of the blocks that have a recording."""
    counts = [
        sum(taken and block.load_s > 0 for taken, block in zip(plan.takes, blocks, strict=True))
        for plan, blocks in zip(plans, steps, strict=True)
    ]
    return " and ".join(map(str, counts))


def draw_plan(sheet: PlanSheet) -> Figure:
    """Draw a lane of loads above one of computing, and the bars below."""
    figure = Figure(figsize=(WIDTH / _DPI, 6.5 + 0.5 * len(sheet.bars)), dpi=_DPI, layout="constrained")
    figure.suptitle("\n".join([sheet.title, *sheet.subtitle]), x=0.01, ha="left")
    lanes, bars = figure.subplots(2, height_ratios=(4, 0.5 * len(sheet.bars)))
    loaded_s = computed_s = 0.0
    for number, (blocks, plan) in enumerate(zip(sheet.steps, sheet.plans, strict=True)):
        for block, taken, wait_s in zip(blocks, plan.takes, plan.waits_s, strict=True):
            begin_s = computed_s + wait_s
            if taken and block.load_s:
                lanes.broken_barh([(loaded_s, block.load_s)], (2, 1), color=_LOADED[number % 2], edgecolor="white")
                loaded_s += block.load_s
                lanes.plot([loaded_s, begin_s], [2, 1], color=_ARROW, linewidth=1)
            lanes.broken_barh([(computed_s, wait_s)], (0, 1), color=_WAIT)
            took_s = block.masked_s if taken else block.full_s
            lanes.broken_barh([(begin_s, took_s)], (0, 1), color=_MASKED if taken else _FULL)
            computed_s = begin_s + took_s
        lanes.axvline(computed_s, color="black", linewidth=1, linestyle="--")
        lanes.annotate(f"step {number + 1} is done", (computed_s, 3.1), ha="right", annotation_clip=False)
    lanes.set(xlim=(0, computed_s), yticks=(0.5, 2.5), yticklabels=("compute\non the device", "load\nfrom the store"))
    lanes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * 1e3:g} ms")
    patches = [Patch(color=colour, label=label) for colour, label in _LEGEND.items()]
    lanes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(patches), frameon=False)
    ordered = sorted(sheet.bars, key=lambda bar: bar.seconds, reverse=True)
    colours = [_MASKED if bar.chosen else _OTHER for bar in ordered]
    drawn = bars.barh([bar.label for bar in ordered], [bar.seconds for bar in ordered], color=colours)
    bars.bar_label(drawn, [f" {bar.seconds * 1e3:.0f} ms" for bar in ordered], padding=2)
    bars.set(title="The same steps in other ways", xticks=())
    for axes in (lanes, bars):
        axes.spines[["top", "left", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Measure, plan, draw the sheet and write it."""
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
    draw_plan(sheet).savefig(options.file)
    print(options.file)


if __name__ == "__main__":
    main()
