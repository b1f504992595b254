"""What masked rows cost an engine: they enter no table of plain ones, and count as fractions of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from tests.samples.masked_edits import SPEC, EditDesk, masked_order

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
    assert dict(desk.engine.steps_left()) == {SECOND.key: 8}  # two steps of four images each
    assert desk.engine.computed_shares() == {SECOND.key: pytest.approx(share)}


def test_a_request_that_takes_nothing_from_a_recording_costs_whole_rows(model: Model) -> None:
    desk = EditDesk(model)
    drawing = desk.submit(FIRST)
    desk.turn()
    assert drawing.job is not None
    assert drawing.job.requests[0].computed_share == 1.0
    assert dict(desk.engine.steps_left()) == {"first": 2}
    assert desk.engine.computed_shares() == {"first": 1.0}
