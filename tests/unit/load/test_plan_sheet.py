"""The sheet of an edit's plan: what it compares, and that the picture shows what was planned."""

from __future__ import annotations

import numpy as np
import pytest

from bottega.client import BlockProfile, ProfiledBlock
from bottega.planning.block_loading import BlockCost, plan_steps
from load.plan_drawing import WIDTH, Bar, PlanSheet, draw_plan
from load.plan_sheet import bytes_per_s, in_order, pipelined, sheet_of, step_of

GREEN, ORANGE = (0x3A, 0x9D, 0x5D), (0xE0, 0x8A, 0x2E)


def _profile(blocks: int = 12) -> BlockProfile:
    return BlockProfile(
        model_hash="ab" * 32,
        dtype="float32",
        width=512,
        height=512,
        shares=(0.05, 0.2, 0.4),
        blocks=tuple(
            ProfiledBlock(name=f"blocks.{place}", size_bytes=1 << 20, full_s=0.01, masked_s=(0.001, 0.003, 0.005))
            for place in range(blocks)
        ),
        forward_s=blocks * 0.011,
    )


def test_a_step_has_both_halves_of_guidance() -> None:
    blocks = step_of(_profile(), share=0.2, bytes_per_s=1 << 20)
    assert len(blocks) == 12
    assert len({block.name for block in blocks}) == 12
    assert (blocks[0].full_s, blocks[0].masked_s, blocks[0].load_s) == pytest.approx((0.02, 0.006, 2.0))


def test_the_pace_of_loading_is_that_of_computing_times_the_slowness() -> None:
    rate = bytes_per_s(_profile(), share=0.2, slowness=2.0)
    step = step_of(_profile(), share=0.2, bytes_per_s=rate)
    assert sum(block.load_s for block in step) == pytest.approx(2 * sum(block.masked_s for block in step))


@pytest.mark.parametrize("slowness", [0.5, 1.0, 3.0])
def test_the_plan_is_never_slower_than_what_it_is_compared_with(slowness: float) -> None:
    rate = bytes_per_s(_profile(), share=0.2, slowness=slowness)
    sheet = sheet_of(_profile(), "bench", share=0.2, rate=rate)
    (chosen,) = (bar for bar in sheet.bars if bar.chosen)
    others = [bar.seconds for bar in sheet.bars if not bar.chosen]
    assert len(others) == 3
    assert all(chosen.seconds <= seconds + 1e-9 for seconds in others)
    assert in_order(sheet.steps) >= pipelined(sheet.steps)


def test_what_is_drawn_is_the_plan() -> None:
    """One block is loaded and the other is not: the compute lane is as long in either colour as each takes."""
    steps = [
        [
            BlockCost(name="first", full_s=0.3, masked_s=0.1, load_s=0.9),
            BlockCost(name="second", full_s=0.7, masked_s=0.1, load_s=0.2),
        ]
    ]
    plans = plan_steps(steps)
    assert plans[0].takes == (False, True)
    sheet = PlanSheet(title="t", subtitle=("s",), steps=steps, plans=plans, bars=[Bar(label="b", seconds=0.4)])
    picture = draw_plan(sheet).convert("RGB")
    assert picture.width == WIDTH
    pixels = np.asarray(picture)
    orange, green = ((pixels == colour).all(axis=2).sum(axis=1) for colour in (ORANGE, GREEN))
    # The legend and the bars have less of one of them.
    lane = (orange > 300) & (green > 100)
    assert lane.sum() > 50
    assert orange[lane] / green[lane] == pytest.approx(3.0, rel=0.03)
