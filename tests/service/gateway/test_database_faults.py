"""A gateway whose PostgreSQL fails over to a standby: no job is lost or drawn twice."""

from __future__ import annotations

import asyncio

import grpc

from bottega.v1 import image_pb2
from tests.support.postgresql import running_pair
from tests.support.running_gateway import Running, running_gateway


async def _submit_again(house: Running, request_id: str) -> str:
    """Submit a job, again while the gateway says that it cannot now, and return its ID."""
    while True:
        try:
            return (await house.submit(request_id, prompt=request_id)).job_id
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
        await asyncio.sleep(0.1)


async def test_jobs_go_on_when_a_standby_takes_over_the_database() -> None:
    with running_pair() as (primary, standby):
        both = f"host={standby.folder},{primary.folder}&port={standby.port},{primary.port}"
        async with running_gateway(jobs=f"postgresql://postgres@/{primary.new_database()}?{both}") as house:
            worker = await house.worker(hold_at=1)
            jobs = [await _submit_again(house, name) for name in ("held", "waiting")]
            await worker.arrived.wait()
            primary.kill()
            during = asyncio.create_task(_submit_again(house, "during"))
            await asyncio.sleep(0.5)
            assert not during.done(), "nothing is acknowledged without a database"
            standby.execute("SELECT pg_promote()")
            jobs.append(await during)
            worker.script.release.set()
            for job_id in jobs:
                assert (await house.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED
            assert sorted(await house.listed()) == sorted(jobs)
            assert [await _submit_again(house, name) for name in ("held", "waiting", "during")] == jobs
        assert len(worker.begun) == len(jobs), "each is drawn once"
