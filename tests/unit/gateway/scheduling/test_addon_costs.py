"""What ControlNets and LoRAs add to steps is learned from the turns of finished jobs, by kind and number."""

from __future__ import annotations

import math
import random

import pytest

from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling import addon_costs
from bottega.gateway.scheduling.addon_costs import AddOnCosts
from bottega.v1.generation_pb2 import Provenance
from tests.fakes.fake_time import FakeTime
from tests.samples.jobs import sample_job

PLAIN, EDGES, BOTH = sample_job(), sample_job(controlnets=["edges"]), sample_job(controlnets=["depth", "edges"])


def styled(count: int, *, controlnets: tuple[str, ...] = ()) -> Job:
    """Return a job with that many LoRAs."""
    job = sample_job(controlnets=controlnets)
    job.lora_set = tuple((f"{number:064x}", 1.0) for number in range(count))
    return job


def measured(plain_s: float = 1.0, *, controlnets_s: float = 0.0, loras_s: float = 0.0) -> Provenance:
    return Provenance(plain_s=plain_s, controlnets_s=controlnets_s, loras_s=loras_s)


@pytest.fixture
def costs(time: FakeTime) -> AddOnCosts:
    return AddOnCosts(time.clock())


def test_jobs_with_controlnets_are_expected_to_take_as_much_longer_as_they_did(costs: AddOnCosts) -> None:
    assert costs.slowdown(EDGES) == 1.0, "nothing was measured"
    for shared in (1.0, 0.5, 0.25):  # turns that other jobs share
        costs.note(EDGES, measured(shared, controlnets_s=0.43 * shared))
    assert costs.slowdown(EDGES) == pytest.approx(1.43, rel=0.02)
    assert costs.slowdown(PLAIN) == 1.0


def test_what_was_not_measured_is_expected_in_proportion(costs: AddOnCosts) -> None:
    pose = sample_job(controlnets=["pose"])
    costs.note(EDGES, measured(controlnets_s=0.2))
    assert costs.slowdown(BOTH) == pytest.approx(1.4, rel=0.02)
    costs.note(BOTH, measured(controlnets_s=0.3))
    assert costs.slowdown(BOTH) == pytest.approx(1.3, rel=0.02)
    assert costs.slowdown(EDGES) == pytest.approx(1.2, rel=0.02)
    assert costs.slowdown(pose) == pytest.approx(1.2, rel=0.02), "as another one does"
    for _ in range(4):
        costs.note(EDGES, measured(controlnets_s=0.2))
        costs.note(pose, measured(controlnets_s=0.8))
    assert costs.slowdown(EDGES) == pytest.approx(1.2, rel=0.02)
    assert costs.slowdown(pose) == pytest.approx(1.8, rel=0.02)


def test_what_loras_add_is_learned_apart_from_what_controlnets_add(costs: AddOnCosts) -> None:
    costs.note(styled(2, controlnets=("edges",)), measured(controlnets_s=0.5, loras_s=0.3))
    assert costs.slowdown(EDGES) == pytest.approx(1.5, rel=0.02)
    assert costs.slowdown(styled(2)) == pytest.approx(1.3, rel=0.02)
    assert costs.slowdown(styled(4, controlnets=("edges",))) == pytest.approx(2.1, rel=0.02)


def test_no_tenants_jobs_change_what_those_of_another_are_expected_to_take(costs: AddOnCosts) -> None:
    slow = sample_job(controlnets=["edges"], tenant="press")
    costs.note(slow, measured(controlnets_s=29.0))
    assert costs.slowdown(slow) > 8.0
    assert costs.slowdown(sample_job(controlnets=["edges"], tenant="shop")) == 1.0


def test_outliers_and_noise_leave_the_estimate_within_a_few_percent(costs: AddOnCosts) -> None:
    chance = random.Random(39)
    for number in range(60):
        outlier = number % 5 == 4  # a server was replaced, or the machine stopped
        costs.note(EDGES, measured(controlnets_s=20.0 if outlier else chance.uniform(0.4, 0.6)))
        if number > 8:
            assert costs.slowdown(EDGES) == pytest.approx(1.5, rel=0.05)


def test_a_lasting_change_is_learned_and_sooner_after_a_pause(costs: AddOnCosts, time: FakeTime) -> None:
    def jobs_until_learned(added: float) -> int:
        for number in range(1, 100):
            costs.note(EDGES, measured(controlnets_s=added))
            if costs.slowdown(EDGES) == pytest.approx(1.0 + added, rel=0.03):
                return number
        raise AssertionError("it was never learned")

    for _ in range(50):
        costs.note(EDGES, measured(controlnets_s=0.2))
    assert 1 < jobs_until_learned(2.0) <= 9
    for _ in range(50):
        costs.note(EDGES, measured(controlnets_s=2.0))
    time.now += 3600.0
    assert jobs_until_learned(0.2) <= 2


def test_jobs_of_few_steps_count_for_little_beside_long_ones(costs: AddOnCosts) -> None:
    short, long = (sample_job(controlnets=["edges"], steps=steps) for steps in (1, 50))
    costs.note(short, measured(0.1, controlnets_s=3.0))  # most of which was a server's first forward pass
    costs.note(long, measured(controlnets_s=1.0))
    costs.note(short, measured(0.1, controlnets_s=3.0))
    assert costs.slowdown(long) == pytest.approx(2.0, rel=0.02)


def test_what_is_no_measurement_changes_nothing(costs: AddOnCosts) -> None:
    for added_s in (-1.0, math.nan, math.inf):
        costs.note(EDGES, measured(controlnets_s=added_s))
        costs.note(EDGES, measured(added_s, controlnets_s=1.0))
    costs.note(EDGES, measured(0.0, controlnets_s=1.0))
    assert costs.slowdown(EDGES) == 1.0


def test_the_estimates_of_many_kinds_are_bounded(costs: AddOnCosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addon_costs, "_MAX_KINDS", 8)
    for number in range(100):
        costs.note(sample_job(controlnets=[f"net-{number}"], tenant=f"t{number}"), measured(controlnets_s=1.0))
    assert len(costs._kinds) == 8
    assert costs.slowdown(sample_job(controlnets=["net-99"], tenant="t99")) == pytest.approx(2.0)
    assert costs.slowdown(sample_job(controlnets=["net-0"], tenant="t0")) == 1.0
