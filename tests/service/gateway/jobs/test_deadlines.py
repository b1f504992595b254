"""Deadlines of jobs as each kind of caller gives them, and what a gateway remembers of a flood of jobs."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

from bottega import errors
from bottega.rpc.channel import open_channel
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import JOB_STATE_COMPLETED
from tests.support.cut_cable import laid
from tests.support.running_gateway import Running, refusal, running_gateway, told
from tests.support.waiting import eventually

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


async def test_every_call_that_draws_can_say_until_when(house: Running) -> None:
    worker = await house.worker(step_s=_STEP_S)
    for error in (
        await refusal(lambda: house.images.SubmitJob(_submitting(deadline_s=2.0, prompt="a star"))),
        await _generate_until_refused(house, "order-1", 2.0, prompt="a star"),
        await _generate_until_refused(house, "", 2.0, prompt="a star"),
    ):
        assert isinstance(error, errors.DeadlineUnmeetable)
    job = await _submit(house, deadline_s=60.0, prompt="a star")
    assert (await house.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED
    (request,) = worker.requests
    assert 30 < request.deadline_s <= 60


async def test_a_submitted_job_that_waits_past_its_deadline_is_dropped(house: Running) -> None:
    worker = await house.worker(hold_at=1)
    await _submit(house, prompt="first")
    await worker.arrived.wait()
    waits = await house.ended((await _submit(house, deadline_s=0.3, prompt="second")).job_id)
    assert (waits.state, waits.error.code) == (image_pb2.JOB_STATE_FAILED, errors.Code.DEADLINE_EXCEEDED)
    assert len(worker.requests) == 1


async def test_a_direct_call_without_any_deadline_has_the_gateways_default() -> None:
    async with running_gateway(default_deadline_s=2.0) as house:
        worker = await house.worker(hold_at=1)
        error = await refusal(lambda: house.generate(timeout=None, prompt="a star"))
        assert isinstance(error, errors.DeadlinePassed)
        assert len(worker.requests) == 1


async def test_what_is_no_time_is_a_violation_also_for_one_who_attaches(house: Running) -> None:
    await house.worker()
    await _submit(house, "known", prompt="a star")
    for deadline_s in (0.0, -1.0, float("nan"), float("inf")):
        wrong = _submitting("order-1", deadline_s=deadline_s, prompt="a", width=-1)
        error = await refusal(functools.partial(house.images.SubmitJob, wrong))
        assert {violation.field for violation in error.violations} == {"deadline_s", "spec.width"}
        error = await _generate_until_refused(house, "known", deadline_s, prompt="a star")
        assert [violation.field for violation in error.violations] == ["deadline_s"]


async def test_who_attaches_with_a_later_deadline_gives_the_job_that_time_over_restarts_too(tmp_path: Path) -> None:
    async with running_gateway(state=str(tmp_path), drain_grace_s=0.1) as house:
        await house.worker(hold_at=1)
        jobs = []
        for later_s in (60.0, None):
            jobs.append((await _submit(house, f"until-{later_s}", deadline_s=4.0, prompt="a star")).job_id)
            assert (await _submit(house, f"until-{later_s}", deadline_s=later_s, prompt="a star")).job_id == jobs[-1]
        await asyncio.sleep(4.2)
        for job_id in jobs:
            assert (await house.job(job_id)).HasField("end_time") is False
        await house.stop_early()
    async with running_gateway(state=str(tmp_path), hold_s=0.1) as house:
        await house.worker("w2")
        for job_id in jobs:
            assert (await house.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def test_an_earlier_deadline_takes_no_time_from_those_who_wait(house: Running) -> None:
    worker = await house.worker(hold_at=1)
    job = await _submit(house, "order-1", deadline_s=20.0, prompt="a star")
    await _submit(house, "order-1", deadline_s=0.2, prompt="a star")
    await asyncio.sleep(0.5)
    assert (await house.job(job.job_id)).state == image_pb2.JOB_STATE_RUNNING
    worker.script.release.set()
    assert (await house.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def test_a_worker_that_gives_a_job_up_by_the_deadline_of_the_first_caller_gets_it_again(house: Running) -> None:
    worker = await house.worker(hold_at=1)
    job = await _submit(house, "order-1", deadline_s=60.0, prompt="a star")
    await worker.arrived.wait()
    await told(house.generate("order-1", prompt="a star"))
    worker.script.failure = errors.DeadlinePassed("the deadline passed before the images were done")
    worker.arrived.clear()
    worker.script.release.set()
    await worker.arrived.wait()
    worker.script.failure = None
    assert (await house.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED
    assert [request.HasField("deadline_s") for request in worker.requests] == [True, False]


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

        async def is_swept() -> bool:
            return len(await gateway.listed()) == 10

        await eventually(is_swept)
        assert set(await gateway.listed()) > set(theirs)
