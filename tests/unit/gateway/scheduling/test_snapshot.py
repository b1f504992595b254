"""What a job needs of a worker, as the policy sees it."""

from __future__ import annotations

import dataclasses
import random

import pytest

from bottega.gateway.scheduling.policy import PendingJob, assign
from bottega.gateway.scheduling.snapshot import FleetSnapshot, _request_for
from bottega.gateway.scheduling.worker_plan import ResourceRequest, WorkerPlan, WorkerState
from bottega.planning import StepTimes
from tests.fakes.gateway_rules import Shop
from tests.samples.controlnet_hosts import load, net, server
from tests.samples.jobs import sample_job

TIMES = StepTimes.from_entries([((16, 16), 2, 0.5), ((16, 16), 4, 0.6)])
PLAIN, SLOW = (ResourceRequest(rows=2, steps=10, shape=(16, 16), slowdown=factor) for factor in (1.0, 1.5))


def state(*running: ResourceRequest) -> WorkerState:
    return WorkerState(worker="w", running=running, times=TIMES, fixed_s=0.0, max_rows=16)


def test_a_slowdown_makes_a_job_longer_and_its_turns_no_wider() -> None:
    assert state().alone_s(SLOW) == 1.5 * state().alone_s(PLAIN) == pytest.approx(7.5)
    assert WorkerPlan(state()).completes_s(SLOW, 0) == pytest.approx(7.5)
    assert state().work(SLOW, (16, 16)) == state().work(PLAIN, (16, 16))


@pytest.mark.parametrize(("jobs", "turn_s"), [((PLAIN, PLAIN), 0.6), ((PLAIN, SLOW), 0.85), ((SLOW, SLOW), 1.1)])
def test_a_turn_waits_for_the_add_ons_of_all_its_jobs(jobs: tuple[ResourceRequest, ...], turn_s: float) -> None:
    assert WorkerPlan(state(*jobs)).completions_s() == pytest.approx([10 * turn_s] * 2)
    first, second = jobs
    assert WorkerPlan(state(first)).completes_s(second, 0) == pytest.approx(10 * turn_s)


def test_the_work_of_a_job_is_counted_in_evaluations_of_the_network() -> None:
    job = sample_job()
    plain = _request_for(job, steps_left=10, share=1.0, slowdown=1.0)
    job.request = dataclasses.replace(job.request, evaluations_per_step=1.9)
    assert (plain.steps, _request_for(job, steps_left=10, share=1.0, slowdown=1.0).steps) == (10, 19)


async def test_the_next_job_is_expected_to_take_what_controlnets_added_to_the_last(shop: Shop) -> None:
    shop.worker()
    shop.fleet.report(shop.fleet.join(server("s1")), load(net("edges")))
    edges = sample_job(shop.time, controlnets=["edges"])
    await shop.complete(shop.take(edges), plain_s=1.0, controlnets_s=0.5)
    requests = [shop.controller._snapshot.resource_request(job) for job in (edges, sample_job(shop.time))]
    assert [request.slowdown for request in requests] == pytest.approx([1.5, 1.0], rel=0.02)


async def test_cached_states_lead_to_the_choices_of_a_new_look_at_all_workers(shop: Shop) -> None:
    chance = random.Random("states")
    members = [shop.worker(f"w{number}") for number in range(24)]
    controller = shop.controller
    for _ in range(60):
        match chance.choice(("take", "step", "report")):
            case "take":
                shop.take(sample_job(shop.time, steps=chance.randrange(4, 20)))
            case "step":
                await shop.step(chance.choice(members))
            case "report":
                shop.report(chance.choice(members), seconds=chance.uniform(0.05, 0.5))
        fresh = FleetSnapshot(shop.fleet, shop.dispatcher, shop.log, controller._addons, shop.time.clock())
        cached_states, new_states = (snapshot.workers_of("m") for snapshot in (controller._snapshot, fresh))
        assert cached_states == new_states
        assert [each.load_s for each in cached_states] == [each.load_s for each in new_states]
        line = [PendingJob(job_id=str(steps), request=PLAIN._replace(steps=steps)) for steps in (5, 30, 10)]
        assert assign(line, cached_states, waiting=len(line)) == assign(line, new_states, waiting=len(line))
