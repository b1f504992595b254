"""What ControlNets and LoRAs add is learnt from what jobs have used, and plain jobs are what it is compared with."""

from __future__ import annotations

import dataclasses
import math

import pytest

from bottega.gateway.scheduling.snapshot import AddOnCosts, _request_for
from bottega.gateway.scheduling.worker_plan import ResourceRequest, WorkerState
from bottega.planning import StepTimes
from tests.samples.jobs import sample_job

PLAIN, CONTROLLED = sample_job(), sample_job(controlnets=["edges"])


def test_jobs_with_controlnets_are_expected_to_take_as_much_longer_as_they_did() -> None:
    costs = AddOnCosts()
    assert costs.slowdown(CONTROLLED) == 1.0, "nothing was measured"
    for _ in range(20):
        costs.note(PLAIN, plain_s=1.0, device_s=0.5)  # they share turns
        costs.note(CONTROLLED, plain_s=1.0, device_s=1.0)
    assert costs.slowdown(CONTROLLED) == pytest.approx(2.0)
    assert costs.slowdown(PLAIN) == 1.0
    assert costs.slowdown(sample_job(controlnets=["edges", "depth"])) == 1.0


def test_no_tenants_jobs_change_what_those_of_another_are_expected_to_take() -> None:
    costs = AddOnCosts()
    slow = sample_job(controlnets=["edges"], tenant="press")
    for _ in range(20):
        costs.note(slow, plain_s=1.0, device_s=30.0)
    assert costs.slowdown(slow) > 8.0
    assert costs.slowdown(sample_job(controlnets=["edges"], tenant="shop")) == 1.0


def test_jobs_of_few_steps_count_for_little_beside_long_ones() -> None:
    costs = AddOnCosts()
    short, long = (sample_job(controlnets=["edges"], steps=steps) for steps in (1, 50))
    costs.note(short, plain_s=0.1, device_s=3.0)  # most of which was loading
    costs.note(long, plain_s=1.0, device_s=2.0)
    costs.note(short, plain_s=0.1, device_s=3.0)
    assert costs.slowdown(long) == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize("device_s", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_measurement_changes_nothing(device_s: float) -> None:
    costs = AddOnCosts()
    costs.note(CONTROLLED, plain_s=1.0, device_s=device_s)
    costs.note(CONTROLLED, plain_s=0.0, device_s=1.0)
    assert costs.slowdown(CONTROLLED) == 1.0


def test_a_slowdown_makes_a_job_longer_and_its_turns_no_wider() -> None:
    times = StepTimes.from_entries([((16, 16), 2, 0.5)])
    state = WorkerState(worker="w", running=(), times=times, fixed_s=0.0, max_rows=16)
    plain, slow = (ResourceRequest(rows=2, steps=10, shape=(16, 16), slowdown=factor) for factor in (1.0, 2.0))
    assert state.alone_s(slow) == 2 * state.alone_s(plain) == pytest.approx(10.0)
    assert (state.work(slow, (16, 16)).rows, state.work(slow, (16, 16)).steps) == (2.0, 20)


def test_the_work_of_a_job_is_counted_in_evaluations_of_the_network() -> None:
    job = sample_job()
    plain = _request_for(job, steps_left=10, share=1.0, slowdown=1.0)
    job.request = dataclasses.replace(job.request, evaluations_per_step=1.9)
    assert (plain.steps, _request_for(job, steps_left=10, share=1.0, slowdown=1.0).steps) == (10, 19)
