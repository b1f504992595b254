"""Tenants share the seconds of a device: what jobs use is measured, and long turns make way for those of others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bottega.engine.events import JobAdvanced
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.engine.step import RequestCost, seconds_by_request
from bottega.fair_order import Share
from bottega.model.model import Model
from tests.samples.small_model import SIZE
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine
from tests.support.stock import assert_same_image

SMALL = ResolvedSpec(prompt="a red star", width=SIZE, height=SIZE, num_inference_steps=4, seed=7)
LARGE = replace(SMALL, width=4 * SIZE, height=4 * SIZE)
# The light one is behind whatever its turns take on a busy machine.
HEAVY, LIGHT = Share(tenant="heavy"), Share(tenant="light", weight=100.0)


def test_a_job_says_what_it_has_used_of_the_device(model: Model) -> None:
    easel = ManualEngine(make_engine(model, EngineLimits(progress_interval_s=0.0)))
    drawing = easel.draw(EngineOrder(key=0, spec=SMALL))
    spans = [span for span in drawing.trace.spans if span.track in {"encode", "denoise", "decode"}]
    assert drawing.record.device_s == pytest.approx(sum(span.seconds for span in spans), rel=0.01)
    told = [event.device_s for event in drawing.all(JobAdvanced)]
    assert told == sorted(told)
    assert 0.0 < told[0] < told[-1] < drawing.record.device_s


def test_jobs_that_share_turns_have_used_a_part_of_each(model: Model) -> None:
    easel = ManualEngine(make_engine(model, EngineLimits(max_wait_turns=0)))
    for key in range(2):
        easel.submit(EngineOrder(key=key, spec=SMALL))
    drawings = easel.run()
    turns = {span.begin_s: span.seconds for each in drawings.values() for span in each.trace.spans}
    used_s = sum(each.record.device_s for each in drawings.values())
    assert used_s == pytest.approx(sum(turns.values()), rel=0.01)


def test_waiting_for_controlnets_is_charged_to_those_who_have_any_and_patching_to_those_with_loras() -> None:
    costs = [
        RequestCost(rows=2.0, waits=False, patched=False),
        RequestCost(rows=2.0, waits=True, patched=False),
        RequestCost(rows=4.0, waits=False, patched=True),
    ]
    seconds = seconds_by_request(costs, turn_s=1.0, waited_s=0.2, patch_s=0.5)
    assert seconds == pytest.approx([0.2, 0.4, 0.9])
    assert seconds_by_request(costs[:1], turn_s=1.0, waited_s=0.2, patch_s=0.5) == pytest.approx([0.8])


def test_a_long_turn_makes_way_for_another_tenant_after_its_first_row_and_draws_the_same(model: Model) -> None:
    alone = ManualEngine(make_engine(model, EngineLimits())).draw(EngineOrder(key=0, spec=LARGE))
    easel = ManualEngine(make_engine(model, EngineLimits()))
    easel.engine.warm_up()
    easel.draw(EngineOrder(key="before", spec=SMALL, share=LIGHT))
    heavy = easel.submit(EngineOrder(key="heavy", spec=LARGE, share=HEAVY))
    before = easel.engine.turns
    easel.turn()
    assert (easel.engine.turns - before, heavy.latents != [], heavy.job and heavy.job.steps_done) == (1, True, 0)
    light = easel.submit(EngineOrder(key="light", spec=SMALL, share=LIGHT))
    while not light.ended:
        easel.turn()
    assert heavy.job is not None
    assert heavy.job.steps_done == 0, "its second row is predicted when the other tenant's picture is done"
    easel.run()
    assert_same_image(heavy.pixels[0], alone.pixels[0])
    assert easel.engine.steps == 4 + 4 + 4
    assert light.record.device_s < heavy.record.device_s


def test_a_job_that_is_cancelled_in_the_middle_of_a_step_leaves_nothing(model: Model) -> None:
    easel = ManualEngine(make_engine(model, EngineLimits()))
    easel.engine.warm_up()
    easel.draw(EngineOrder(key="before", spec=SMALL, share=LIGHT))
    easel.submit(EngineOrder(key="heavy", spec=LARGE, share=HEAVY))
    easel.turn()
    easel.engine.cancel("heavy")
    assert not easel.engine._stepper._halves
    assert not easel.engine.busy
