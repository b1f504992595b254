"""What a gateway remembers while somebody makes as many jobs as it can: what others have finished."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bottega.rpc.channel import open_channel
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import JOB_STATE_COMPLETED
from tests.support.cut_cable import laid
from tests.support.running_gateway import Running, running_gateway

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
