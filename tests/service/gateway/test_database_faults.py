"""Gateways whose PostgreSQL fails over to a standby, or answers slowly: no job is lost or drawn twice."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from bottega.v1 import image_pb2
from tests.support.cut_cable import laid
from tests.support.postgresql import PASSWORD, running_pair, running_server
from tests.support.running_gateway import Running, running_gateway
from tests.support.waiting import eventually

# Types of the messages of PostgreSQL's protocol that begin a query; a password or the end of a session is none.
_QUERIES = b"QPB"
_SLOW_S = 2.0


async def _submit(house: Running, request_id: str) -> str | None:
    """Submit a job and return its ID; None if the gateway says that it cannot now."""
    try:
        return (await house.submit(request_id, prompt=request_id)).job_id
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return None


async def _submit_again(house: Running, request_id: str) -> str:
    """Submit a job until the gateway takes it, and return its ID."""
    job_id: str | None = None

    async def is_taken() -> bool:
        nonlocal job_id
        job_id = await _submit(house, request_id)
        return job_id is not None

    await eventually(is_taken)
    assert job_id is not None
    return job_id


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


@pytest.mark.slow
async def test_slow_queries_lose_and_double_no_job_and_change_no_scheduler(pictures: str) -> None:
    slow = False
    with running_server() as server:
        name = server.new_database()
        async with laid(f"127.0.0.1:{server.port}") as cable:
            cable.pause_s = lambda data: _SLOW_S if slow and data[0] in _QUERIES else 0.0
            url = f"postgresql://postgres:{PASSWORD}@{cable.address}/{name}"
            async with (
                running_gateway(jobs=url, objects=pictures, name="a") as house,
                running_gateway(jobs=url, objects=pictures, name="b") as other,
            ):
                worker = await house.worker(hold_at=1)
                running = await _submit_again(house, "running")
                await worker.arrived.wait()
                slow = True
                names = [f"slow-{number}" for number in range(3)]
                asked = [(one, each) for each in names for one in (house, other)]
                told = await asyncio.gather(*(_submit(one, each) for one, each in asked))
                worker.script.release.set()
                await asyncio.sleep(3 * _SLOW_S)
                assert house.gateway._role.held
                slow = False
                jobs = {each: await _submit_again(other, each) for each in names}
                for (_, each), job_id in zip(asked, told, strict=True):
                    assert job_id in (None, jobs[each])
                for job_id in (running, *jobs.values()):
                    assert (await other.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED
                assert sorted(await other.listed()) == sorted((running, *jobs.values()))
            assert len(worker.begun) == len(jobs) + 1, "each is drawn once"
