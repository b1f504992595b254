"""A third kind of add-on, by its interface alone: where jobs go, what attempts carry, how they fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from bottega.addons.interface.gateway_addon import (
    NO_COSTS,
    AddOn,
    ExpectedSavings,
    JobCosts,
    PrefetchReason,
    Release,
    WorkerCosts,
)
from bottega.addons.interface.views import AddOnJob, Member
from bottega.errors import BottegaError, DeadlineUnmeetable, QueueFull, Unavailable
from bottega.v1 import worker_pb2
from bottega.v1.generation_pb2 import Provenance
from bottega.v1.image_pb2 import JOB_STATE_QUEUED
from tests.fakes.gateway_rules import Shop
from tests.samples.jobs import sample_job


class Easels(AddOn):
    """Where easels stand.

    of_each, skipped: costs and skipped steps of every job. calls: what was called, in order.
    """

    def __init__(self) -> None:
        self.of_each = NO_COSTS
        self.skipped = 0.0
        self.calls: list[str] = []

    def costs(self, job: AddOnJob) -> JobCosts:
        return JobCosts(key="easel", at=lambda _: self.of_each)

    def expected_savings(self, job: AddOnJob) -> ExpectedSavings:
        return ExpectedSavings(skipped_steps=self.skipped)

    def prefetch(self, jobs: Sequence[AddOnJob], reason: PrefetchReason) -> None:
        if reason is not PrefetchReason.NEXT:
            self.calls.append(reason.name.lower())

    def prepare_attempt(self, job: AddOnJob, worker: Member, request: worker_pb2.RunAttemptRequest) -> Release:
        self.calls.append(f"begin at {worker.name}")
        request.addons["easel"] = b"oak"
        return lambda: self.calls.append("end")

    def job_completed(self, job: AddOnJob, provenance: Provenance) -> None:
        self.calls.append("completed")
        provenance.parameters.prompt = "at the second easel"

    def back_off(self, job: AddOnJob, error: BottegaError) -> bool:
        self.calls.append("back off")
        return isinstance(error, QueueFull)

    def member_changed(self, member: Member, *, lost: bool = False) -> None:
        if lost:
            self.calls.append(f"lost {member.name}")

    async def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def easels() -> Easels:
    return Easels()


@pytest.fixture
async def shop(easels: Easels) -> AsyncIterator[Shop]:
    shop = Shop(addons=[easels])
    yield shop
    await shop.stop()


async def test_a_job_goes_where_what_it_needs_costs_least(shop: Shop, easels: Easels) -> None:
    for name in ("w1", "w2", "w3"):
        shop.worker(name)
    easels.of_each = WorkerCosts(load_s={"w1": 5.0, "w3": 2.0}, eligible=frozenset({"w1", "w3"}))
    assert shop.submit().worker == "w3"


async def test_a_job_goes_where_all_its_add_ons_let_it(shop: Shop, easels: Easels) -> None:
    """Two ControlNets that no server hosts any more, as while theirs is started again, and another add-on's limit."""
    for name in ("w1", "w2"):
        shop.worker(name)
    easels.of_each = WorkerCosts(eligible=frozenset({"w2"}))
    for names in (("edges",), ("edges", "layout"), ("edges", "layout", "pose")):
        job = shop.take(sample_job(shop.time, controlnets=names))
        assert job.state == JOB_STATE_QUEUED, "its ControlNets are nowhere"
    assert shop.submit().worker == "w2"


async def test_an_attempt_carries_its_fields_from_its_begin_to_its_end(shop: Shop, easels: Easels) -> None:
    shop.worker()
    job = shop.submit()
    (request,) = shop.client().requests
    assert request.addons == {"easel": b"oak"}
    assert easels.calls == ["arrived", "begin at w1"]
    await shop.complete(job)
    assert easels.calls[2:] == ["end", "completed"]
    assert job.provenance is not None
    assert job.provenance.parameters.prompt == "at the second easel"


async def test_steps_that_a_job_is_expected_to_skip_take_no_time(shop: Shop, easels: Easels) -> None:
    shop.worker()  # .1 s a turn, ten of them
    for skipped, seconds in ((0.0, 1.0), (3.9, 0.7), (9.5, 0.1)):
        easels.skipped = skipped
        shop.time.now += 1.0
        job = sample_job(shop.time)
        job.deadline = shop.time.now
        with pytest.raises(DeadlineUnmeetable) as refused:
            shop.controller.estimates.check_deadline(job)
        assert float(refused.value.metadata["estimate_s"]) == pytest.approx(seconds)


async def test_whoever_caused_it_is_backed_off_and_the_worker_gets_the_job_again(shop: Shop, easels: Easels) -> None:
    shop.worker()
    job = shop.submit()
    await shop.fail(job, QueueFull("no easel is free"))
    assert "back off" in easels.calls
    assert (job.worker, job.attempts) == ("w1", 2), "the worker rests for no moment"


async def test_what_would_fail_at_every_worker_is_not_tried_again(shop: Shop, easels: Easels) -> None:
    easels.final_errors = (Unavailable,)
    shop.worker()
    job = shop.submit()
    await shop.fail(job, Unavailable("there are no easels"))
    await asyncio.wait_for(job.ended.wait(), 2)
    assert (job.error is not None and job.error.message, job.attempts) == ("there are no easels", 1)


async def test_it_stops_with_the_gateway_and_hears_of_losses(shop: Shop, easels: Easels) -> None:
    shop.worker()
    shop.start()
    shop.fleet.close()
    await shop.stop()
    assert easels.calls == ["lost w1", "close"]
