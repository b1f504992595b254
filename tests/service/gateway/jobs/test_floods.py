"""What a gateway remembers while somebody makes as many jobs as it can: what others have finished."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from bottega.rpc.channel import open_channel
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import JOB_STATE_CANCELLED, JOB_STATE_COMPLETED
from tests.support.cut_cable import laid
from tests.support.running_gateway import Running, running_gateway

# Four texts of the largest size: 64 KiB of each job, so that 130 jobs are more than JOBS_BYTES.
LONG = 16 << 10
FLOOD = 160
JOBS_BYTES = 8 << 20
AT_ONCE = 16
# Nobody counts on less than two sweeps, which are a second apart.
SWEPT_S = 2.5


@contextlib.asynccontextmanager
async def _caller(gateway: Running, host: str) -> AsyncIterator[image_pb2_grpc.ImageServiceAsyncStub]:
    """Calls that come from another host."""
    async with laid(gateway.address, source=host) as cable, open_channel(cable.address) as channel:
        stub: image_pb2_grpc.ImageServiceAsyncStub = image_pb2_grpc.ImageServiceStub(channel)
        yield stub


async def _flood(calls: Iterator[int], stub: image_pb2_grpc.ImageServiceAsyncStub, spec: GenerationSpec) -> None:
    for _ in calls:
        job = (await stub.SubmitJob(image_pb2.SubmitJobRequest(spec=spec), timeout=30)).job
        await stub.CancelJob(image_pb2.CancelJobRequest(job_id=job.job_id), timeout=30)


async def _complete(gateway: Running, stub: image_pb2_grpc.ImageServiceAsyncStub, request_id: str) -> str:
    request = image_pb2.SubmitJobRequest(request_id=request_id, spec=GenerationSpec(prompt="star", seed=1))
    job_id = (await stub.SubmitJob(request, timeout=20)).job.job_id
    assert (await gateway.ended(job_id)).state == JOB_STATE_COMPLETED
    return job_id


async def _expect_remembered(gateway: Running, job_id: str, request_id: str) -> None:
    assert (await gateway.job(job_id)).state == JOB_STATE_COMPLETED
    assert (await gateway.submit(request_id, prompt="star", seed=1)).job_id == job_id
    parts = [part.chunk async for part in gateway.images.GetImage(image_pb2.GetImageRequest(job_id=job_id), timeout=20)]
    assert b"".join(parts) == b"picture 0"


async def test_submitting_and_cancelling_pushes_out_nobodys_finished_job() -> None:
    async with running_gateway(jobs_bytes=JOBS_BYTES) as gateway:
        worker = await gateway.worker()
        theirs = await _complete(gateway, gateway.images, "theirs")
        worker.script.hold_at = 1
        calls, text = iter(range(FLOOD)), "a" * LONG
        spec = GenerationSpec(prompt=text, prompt_2=text, negative_prompt=text, negative_prompt_2=text)
        await asyncio.gather(*(_flood(calls, gateway.images, spec) for _ in range(AT_ONCE)))
        await asyncio.sleep(SWEPT_S)
        await _expect_remembered(gateway, theirs, "theirs")
        listed = await gateway.images.ListJobs(image_pb2.ListJobsRequest(page_size=5), timeout=20)
        assert [job.state for job in listed.jobs] == [JOB_STATE_CANCELLED] * 5
        assert all(len(job.spec.prompt) < 300 for job in listed.jobs)


async def test_a_flood_of_completed_jobs_pushes_out_those_of_its_own_host() -> None:
    async with running_gateway(max_jobs=40) as gateway, _caller(gateway, "127.0.0.2") as flooding:
        await gateway.worker()
        theirs = {
            f"theirs-{number}": await _complete(gateway, gateway.images, f"theirs-{number}") for number in range(10)
        }
        floods = [await _complete(gateway, flooding, f"flood-{number}") for number in range(80)]
        await asyncio.sleep(SWEPT_S)
        for request_id, job_id in theirs.items():
            await _expect_remembered(gateway, job_id, request_id)
        listed = await gateway.images.ListJobs(image_pb2.ListJobsRequest(page_size=100), timeout=20)
        assert {job.job_id for job in listed.jobs} == {*theirs.values(), *floods[-30:]}


async def test_peers_are_remembered_over_a_restart(tmp_path: Path) -> None:
    state = str(tmp_path)
    async with running_gateway(max_jobs=20, state=state) as gateway:
        await gateway.worker()
        theirs = [await _complete(gateway, gateway.images, f"theirs-{number}") for number in range(5)]
        async with _caller(gateway, "127.0.0.2") as flooding:
            for number in range(15):
                await _complete(gateway, flooding, f"flood-{number}")
    async with running_gateway(max_jobs=10, state=state) as gateway:
        await asyncio.sleep(SWEPT_S)
        listed = await gateway.images.ListJobs(image_pb2.ListJobsRequest(page_size=100), timeout=20)
        assert len(listed.jobs) == 10
        assert {job.job_id for job in listed.jobs} > set(theirs)
