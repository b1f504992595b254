"""Deadlines of jobs as each kind of caller gives them, and what a gateway remembers of a flood of jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bottega import errors
from bottega.rpc.channel import open_channel
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import JOB_STATE_COMPLETED
from tests.support.cut_cable import laid
from tests.support.running_gateway import Running, refusal, running_gateway, told

# Steps of the default of 30 that take 3 s alone.
_STEP_S = {2: 0.1, 4: 0.2}


def _submitting(request_id: str = "", *, deadline_s: float | None = None, **spec: Any) -> image_pb2.SubmitJobRequest:
    return image_pb2.SubmitJobRequest(request_id=request_id, spec=GenerationSpec(**spec), deadline_s=deadline_s)


async def _submit(house: Running, request_id: str = "", **fields: Any) -> image_pb2.Job:
    return (await house.images.SubmitJob(_submitting(request_id, **fields), timeout=20)).job


async def _generate_until_refused(
    house: Running, request_id: str, deadline_s: float | None, **spec: Any
) -> errors.BottegaError:
    request = image_pb2.GenerateRequest(request_id=request_id, spec=GenerationSpec(**spec), deadline_s=deadline_s)
    return await refusal(lambda: house.images.Generate(request, timeout=20))


async def test_every_call_that_draws_can_say_until_when() -> None:
    async with running_gateway() as house:
        worker = await house.worker(step_s=_STEP_S)
        for error in (
            await refusal(lambda: house.images.SubmitJob(_submitting(deadline_s=2.0, prompt="a star"))),
            await _generate_until_refused(house, "order-1", 2.0, prompt="a star"),
            await _generate_until_refused(house, "", 2.0, prompt="a star"),
        ):
            assert isinstance(error, errors.DeadlineUnmeetable)
        job = await _submit(house, deadline_s=8.0, prompt="a star")
        assert (await house.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED
        (request,) = worker.requests
        assert 6 < request.deadline_s <= 8


async def test_a_submitted_job_that_waits_past_its_deadline_is_dropped() -> None:
    async with running_gateway() as house:
        worker = await house.worker(hold_at=1)
        await _submit(house, prompt="first")
        await asyncio.wait_for(worker.arrived.wait(), 2)
        waits = await house.ended((await _submit(house, deadline_s=0.3, prompt="second")).job_id)
        assert (waits.state, waits.error.code) == (image_pb2.JOB_STATE_FAILED, errors.Code.DEADLINE_EXCEEDED)
        assert len(worker.requests) == 1


async def test_a_direct_call_without_any_deadline_has_the_gateways_default() -> None:
    async with running_gateway(default_deadline_s=0.4) as house:
        worker = await house.worker(hold_at=1)
        error = await asyncio.wait_for(refusal(lambda: house.generate(timeout=None, prompt="a star")), 5)
        assert isinstance(error, errors.DeadlinePassed)
        assert len(worker.requests) == 1


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf")])
async def test_what_is_no_time_is_a_violation_also_for_one_who_attaches(deadline_s: float) -> None:
    async with running_gateway() as house:
        await house.worker()
        for _ in range(2):
            error = await refusal(
                lambda: house.images.SubmitJob(_submitting("order-1", deadline_s=deadline_s, prompt="a", width=-1))
            )
            assert {violation.field for violation in error.violations} == {"deadline_s", "spec.width"}
        await _submit(house, "order-2", prompt="a star")
        error = await _generate_until_refused(house, "order-2", deadline_s, prompt="a star")
        assert [violation.field for violation in error.violations] == ["deadline_s"]


@pytest.mark.parametrize("later_s", [20.0, None])
async def test_who_attaches_with_a_later_deadline_gives_the_job_that_time_over_restarts_too(
    tmp_path: Path, later_s: float | None
) -> None:
    state = str(tmp_path)
    async with running_gateway(state=state, drain_grace_s=0.1) as house:
        await house.worker(hold_at=1)
        job = await _submit(house, "order-1", deadline_s=1.0, prompt="a star")
        assert (await _submit(house, "order-1", deadline_s=later_s, prompt="a star")).job_id == job.job_id
        await asyncio.sleep(1.2)
        assert (await house.job(job.job_id)).state == image_pb2.JOB_STATE_RUNNING
        await house.gateway.server.drain(house.gateway.finish)
    async with running_gateway(state=state, hold_s=0.1) as house:
        await house.worker("w2")
        assert (await house.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def test_an_earlier_deadline_takes_no_time_from_those_who_wait() -> None:
    async with running_gateway() as house:
        worker = await house.worker(hold_at=1)
        job = await _submit(house, "order-1", deadline_s=20.0, prompt="a star")
        await _submit(house, "order-1", deadline_s=0.2, prompt="a star")
        await asyncio.sleep(0.5)
        assert (await house.job(job.job_id)).state == image_pb2.JOB_STATE_RUNNING
        worker.script.release.set()
        assert (await house.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def test_a_worker_that_gives_a_job_up_by_the_deadline_of_the_first_caller_gets_it_again() -> None:
    async with running_gateway() as house:
        worker = await house.worker(hold_at=1)
        job = await _submit(house, "order-1", deadline_s=1.0, prompt="a star")
        await asyncio.wait_for(worker.arrived.wait(), 2)
        await told(house.generate("order-1", prompt="a star"))
        worker.script.failure = errors.DeadlinePassed("the deadline passed before the images were done")
        worker.arrived.clear()
        worker.script.release.set()
        await asyncio.wait_for(worker.arrived.wait(), 5)
        worker.script.failure = None
        assert (await house.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED
        assert [request.HasField("deadline_s") for request in worker.requests] == [True, False]


# Nobody counts on less than two sweeps, which are a second apart.
SWEPT_S = 2.5


async def _complete(gateway: Running, stub: image_pb2_grpc.ImageServiceAsyncStub, request_id: str) -> str:
    request = image_pb2.SubmitJobRequest(request_id=request_id, spec=GenerationSpec(prompt="star", seed=1))
    job_id = (await stub.SubmitJob(request, timeout=20)).job.job_id
    assert (await gateway.ended(job_id)).state == JOB_STATE_COMPLETED
    return job_id


async def test_a_flood_pushes_out_the_jobs_of_its_own_host_over_a_restart_too(tmp_path: Path) -> None:
    state = str(tmp_path)
    async with running_gateway(max_jobs=20, state=state) as gateway:
        await gateway.worker()
        theirs = [await _complete(gateway, gateway.images, f"theirs-{number}") for number in range(5)]
        async with laid(gateway.address, source="127.0.0.2") as cable, open_channel(cable.address) as channel:
            flooding: image_pb2_grpc.ImageServiceAsyncStub = image_pb2_grpc.ImageServiceStub(channel)
            for number in range(15):
                await _complete(gateway, flooding, f"flood-{number}")
    async with running_gateway(max_jobs=10, state=state) as gateway:
        await asyncio.sleep(SWEPT_S)
        listed = await gateway.images.ListJobs(image_pb2.ListJobsRequest(page_size=100), timeout=20)
        assert len(listed.jobs) == 10
        assert {job.job_id for job in listed.jobs} > set(theirs)
