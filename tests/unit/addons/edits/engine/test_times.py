"""Seconds of blocks fitted to turns, and what masked rows cost an engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.addons.edits.engine.activations import EditActivations
from bottega.addons.edits.engine.masked.work import BlockKind
from bottega.addons.edits.engine.times import MAX_BATCHES, BlockTimes, WorkCost, WorkFit
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from tests.samples.masked_edits import SPEC, EditDesk, masked_order
from tests.samples.masked_networks import StepInMemory, box, plain_row, small_unet

SIZE = (32, 32)
UNET = small_unet()
ROW = plain_row(1, size=SIZE)


def times() -> BlockTimes:
    return BlockTimes(UNET, sparse=True)


def test_whole_rows_of_one_size_give_both_kinds_of_blocks_a_rate() -> None:
    """They do not tell convolutions and transformers apart, and none of them may be taken for free."""
    made = times()
    for rows in (1, 2, 4):
        made.observe([replace(ROW) for _ in range(rows)], 0.1 * rows)
    assert all(seconds > 0 for seconds in made.full_s(SIZE))
    assert sum(made.full_s(SIZE)) == pytest.approx(0.1, rel=0.05)


def test_masked_turns_tell_them_apart() -> None:
    made, computed = times(), box(8, 8, 8, 8, size=SIZE)
    slow, fast = 3e-9, 1e-9
    blocks = made.blocks(SIZE)
    work = made.work(SIZE, computed, 0.07)
    edit = StepInMemory(reused={name for block in blocks for name in block.names})
    masked = replace(ROW, activations=EditActivations(computed=computed, share=0.07, recorded=edit))

    def seconds(share: list[float]) -> float:
        rates = [slow if block.kind is BlockKind.MAPS else fast for block in blocks]
        return sum(rate * block.flops_at(each) for rate, block, each in zip(rates, blocks, share, strict=True))

    full_s, masked_s = seconds([1.0] * len(blocks)), seconds(list(work.shares))
    for rows in range(1, 5):
        made.observe([replace(ROW) for _ in range(rows)], rows * full_s)
        made.observe([replace(masked) for _ in range(rows)], rows * masked_s)
        made.observe([ROW, *[replace(masked) for _ in range(rows)]], full_s + rows * masked_s)
    assert sum(made.full_s(SIZE)) == pytest.approx(full_s, rel=0.05)
    assert sum(made.masked_s(SIZE, work)) == pytest.approx(masked_s, rel=0.1)
    assert made.fit.r2 is not None
    assert made.fit.r2 > 0.99


def test_a_turn_that_records_says_nothing() -> None:
    made = times()
    made.observe([replace(ROW, activations=EditActivations(sink=StepInMemory()))], 5.0)
    assert made.fit.cost is None


def test_a_row_that_takes_nothing_counts_as_whole() -> None:
    made, computed = times(), torch.zeros(SIZE, dtype=torch.bool)
    computed[:4, :4] = True
    nothing = EditActivations(computed=computed, share=0.02, recorded=StepInMemory())
    made.observe([replace(ROW, activations=nothing)], 0.2)
    assert sum(made.full_s(SIZE)) == pytest.approx(0.2, rel=0.05)


FIRST = masked_order(key="first")
SECOND = masked_order(replace(SPEC, seed=6), key="second")
PLAIN = EngineOrder(key="plain", spec=ResolvedSpec(prompt="a star", num_inference_steps=4, width=64, height=64))


def test_masked_and_recording_turns_enter_no_table_of_plain_ones(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)
    desk.draw(SECOND)
    assert not list(desk.engine.step_times.entries())
    desk.draw(PLAIN)
    assert [rows for _, rows, _ in desk.engine.step_times.entries()] == [2]


def test_steps_to_go_are_told_with_the_share_that_they_compute(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(PLAIN)
    desk.draw(FIRST)
    drawing = desk.submit(replace(SECOND, spec=replace(SECOND.spec, num_images=4)))
    desk.turn()
    assert drawing.job is not None
    share = drawing.job.requests[0].computed_share
    assert 0.2 < share < 0.6
    assert dict(desk.engine.evaluations_left()) == {SECOND.key: 8}  # two steps of four images each
    assert desk.engine.computed_shares() == {SECOND.key: pytest.approx(share)}


def law(per_flop_s: float = 2e-12, per_byte_s: float = 3e-10, fixed_s: float = 2e-3) -> WorkCost:
    return WorkCost(per_flop_s=per_flop_s, per_map_flop_s=0.0, per_byte_s=per_byte_s, fixed_s=fixed_s)


def measured(cost: Callable[[float, float], float], *, batches: int = 60) -> WorkFit:
    """A fit over batches of a few hundred megaflops to a hundred gigaflops."""
    fit, rng = WorkFit(), Random(5)
    for _ in range(batches):
        flops, size_bytes = rng.uniform(3e8, 1e11), rng.uniform(1e5, 1e8)
        fit.observe(flops=flops, size_bytes=size_bytes, seconds=cost(flops, size_bytes))
    return fit


@settings(max_examples=25, deadline=None)
@given(per_flop_s=st.floats(1e-13, 1e-11), per_byte_s=st.floats(1e-11, 1e-9), fixed_s=st.floats(0.0, 0.05))
def test_a_linear_law_is_found_again(per_flop_s: float, per_byte_s: float, fixed_s: float) -> None:
    true = law(per_flop_s, per_byte_s, fixed_s)
    fit = measured(true.seconds)
    assert fit.r2 == pytest.approx(1.0)
    for flops, size_bytes in ((1e9, 1e7), (5e10, 1e6), (2e11, 2e8)):
        assert fit.seconds(flops, size_bytes) == pytest.approx(true.seconds(flops, size_bytes), rel=1e-3)


def test_what_follows_no_line_is_not_said_to() -> None:
    r2 = measured(lambda flops, _: 1e-25 * flops**2 * (1 + math.sin(flops / 3e9))).r2
    assert r2 is not None
    assert r2 < 0.9


def test_one_batch_over_and_over_is_followed_and_does_not_push_the_others_out() -> None:
    fit = measured(law().seconds)
    for _ in range(300):
        fit.observe(flops=1e10, size_bytes=1e7, seconds=2 * law().seconds(1e10, 1e7))
    assert fit.seconds(1e10, 1e7) == pytest.approx(2 * law().seconds(1e10, 1e7), rel=0.1)
    said = fit.seconds(1e11, 1e8)
    assert said is not None
    assert said > 5 * law().seconds(1e10, 1e7)


def test_one_kind_alone_says_at_least_what_it_takes() -> None:
    fit = WorkFit()
    assert (fit.seconds(1e9, 1e6), fit.r2, fit.cost) == (None, None, None)
    fit.observe(flops=1e9, size_bytes=1e6, seconds=0.01)
    assert fit.seconds(1e9, 1e6) == pytest.approx(0.01)
    assert fit.r2 is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_says_nothing_changes_nothing(seconds: float) -> None:
    fit = WorkFit()
    fit.observe(flops=1e9, size_bytes=1e6, seconds=seconds)
    fit.observe(flops=math.nan, size_bytes=1e6, seconds=1.0)
    fit.observe(flops=-1.0, size_bytes=1e6, seconds=1.0)
    assert fit.cost is None


def test_of_many_kinds_those_that_ran_longest_ago_are_forgotten() -> None:
    fit = measured(law().seconds, batches=4 * MAX_BATCHES)
    assert len(fit._batches) == MAX_BATCHES
