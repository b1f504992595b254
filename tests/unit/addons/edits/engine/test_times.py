"""Seconds of blocks fitted to turns, and what masked rows cost an engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bottega.addons.edits.engine.activations import EditActivations
from bottega.addons.edits.engine.loading.times import BlockTimes
from bottega.addons.edits.engine.masked.work import BlockKind
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


def test_a_request_that_takes_nothing_from_a_recording_costs_whole_rows(model: Model) -> None:
    desk = EditDesk(model)
    drawing = desk.submit(FIRST)
    desk.turn()
    assert drawing.job is not None
    assert drawing.job.requests[0].computed_share == 1.0
    assert dict(desk.engine.evaluations_left()) == {"first": 2}
    assert desk.engine.computed_shares() == {"first": 1.0}
