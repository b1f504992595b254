"""Gateways in processes of their own that share their jobs in a real PostgreSQL, as their callers see them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psycopg
import pytest

from bottega.errors import ConfigError, StorageUnavailable
from bottega.gateway.scheduler_lease import LEASE_S
from bottega.v1 import image_pb2, worker_pb2
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.gateway_process import GatewayProcess
from tests.support.postgresql import execute, new_database
from tests.support.running_gateway import running_gateway
from tests.support.s3 import S3Server, S3Servers, failing_proxy, set_environment
from tests.support.services import Services
from tests.support.waiting import eventually

_HELD_AT = 3


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two gateways of one database; the first is the scheduler. The worker has joined both."""

    first: GatewayProcess
    second: GatewayProcess
    worker: ScriptedWorker
    database: str
    bucket: S3Server
    objects: str

    def checkpoints(self) -> list[str]:
        """Keys of the checkpoints in the bucket."""
        return [key for key in self.bucket.keys(self.objects.split("/")[2]) if key.startswith("pictures/checkpoints/")]


@pytest.fixture
async def pair(tmp_path: Path, pictures: str, s3_servers: S3Servers) -> AsyncIterator[Pair]:
    with new_database() as url, Services(tmp_path) as services:
        gateways = [
            GatewayProcess(services, tmp_path, name=name, jobs=url, objects=pictures) for name in ("first", "second")
        ]
        first, second = gateways
        try:
            for gateway in gateways:
                await gateway.start()
            worker = await ScriptedWorker("w1", f"{first.fleet},{second.fleet}").start()
            for gateway in gateways:
                await eventually(gateway.knows_a_model)
            bucket = s3_servers.get("nanio")
            yield Pair(first=first, second=second, worker=worker, database=url, bucket=bucket, objects=pictures)
            await worker.die()
        finally:
            for gateway in gateways:
                if gateway.service is not None:
                    gateway.process.send_signal(signal.SIGCONT)
                await gateway.close()


async def test_all_gateways_serve_all_jobs_also_after_the_scheduler_was_killed(pair: Pair) -> None:
    jobs = [await pair.first.submit(), await pair.second.submit()]
    for gateway in (pair.first, pair.second):
        assert [(await gateway.ended(job)).state for job in jobs] == [image_pb2.JOB_STATE_COMPLETED] * 2
        assert sorted(await gateway.listed()) == sorted(jobs)
    pair.worker.script.hold_at = _HELD_AT
    for cancelling, other in ((pair.first, pair.second), (pair.second, pair.first)):
        job_id = await other.submit()
        await eventually(lambda job_id=job_id: pair.second.is_running(job_id))  # type: ignore[misc]
        await cancelling.images.CancelJob(image_pb2.CancelJobRequest(job_id=job_id), timeout=30)
        assert (await other.job(job_id)).state == image_pb2.JOB_STATE_CANCELLED
    before = len(pair.worker.begun)
    running = await pair.first.submit("running")
    await eventually(lambda: pair.first.is_running(running))
    waiting = [await pair.second.submit(f"waiting-{number}") for number in range(3)]
    watched = asyncio.create_task(pair.second.ended(running))
    await pair.first.kill()
    late = await pair.second.submit("late")  # it waits for the next scheduler
    pair.worker.script.release.set()
    assert (await watched).state == image_pb2.JOB_STATE_COMPLETED
    for job_id in (running, *waiting, late):
        assert (await pair.second.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED
    # No attempt began again.
    assert sorted(job for job, _ in pair.worker.begun[before:]) == sorted([running, *waiting, late])


async def test_a_rolling_restart_refuses_no_call(pair: Pair) -> None:
    stopping = asyncio.create_task(pair.first.stop())
    jobs: list[str] = []
    while not stopping.done():
        coming = [f"job-{len(jobs) + number}" for number in range(3)]
        jobs += await asyncio.gather(*map(pair.second.submit, coming))
    assert await stopping == 0
    for job_id in jobs:
        assert (await pair.second.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def test_a_follower_that_stops_during_a_takeover_ends(pair: Pair) -> None:
    pair.worker.script.hold_at = _HELD_AT
    job_id = await pair.first.submit()
    await eventually(lambda: pair.first.is_running(job_id))
    await pair.first.kill()
    await eventually(lambda: pair.second.logged("this gateway is the scheduler") == 1)
    assert await pair.second.stop() == 0
    await pair.first.start()
    pair.worker.script.release.set()
    assert (await pair.first.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def test_a_job_goes_on_from_its_checkpoint_after_a_host_is_lost(pair: Pair) -> None:
    pair.worker.script.hold_at = 20
    running = await pair.first.submit("running")
    await pair.worker.arrived.wait()
    attempt = pair.worker.requests[0].attempt
    await pair.worker.checkpoints.put(
        worker_pb2.WatchCheckpointsResponse(attempt=attempt, steps_done=15, checkpoint=b"15")
    )
    await eventually(lambda: bool(pair.checkpoints()))
    await pair.first.kill()  # with the worker, as when their machine fails
    await pair.worker.die()
    other = ScriptedWorker("w2", f"{pair.first.fleet},{pair.second.fleet}")
    try:
        await other.start()
        ended = await pair.second.ended(running)
    finally:
        await other.die()
    assert (ended.state, ended.provenance.worker) == (image_pb2.JOB_STATE_COMPLETED, "w2")
    (request,) = other.requests
    assert request.checkpoint == b"15"
    await eventually(lambda: not pair.checkpoints())


async def test_a_frozen_scheduler_that_wakes_changes_nothing_and_ends(pair: Pair) -> None:
    pair.worker.script.hold_at = _HELD_AT
    running = await pair.first.submit("running")
    await eventually(lambda: pair.first.is_running(running))
    pair.first.process.send_signal(signal.SIGSTOP)
    # It hangs at the frozen gateway, until the next scheduler is known: long before its deadline.
    late = await pair.second.submit("late")
    pair.worker.script.release.set()
    assert (await pair.second.ended(running)).state == image_pb2.JOB_STATE_COMPLETED
    # It has calls to answer when it wakes, before it knows that it is not the scheduler any more.
    stale = [asyncio.create_task(pair.first.submit(f"stale-{number}")) for number in range(3)]
    await asyncio.sleep(0.5)
    pair.first.process.send_signal(signal.SIGCONT)
    answers = await asyncio.gather(*stale, return_exceptions=True)
    await asyncio.to_thread(pair.first.process.wait, 60)
    assert pair.first.process.wait(1) == 1  # so that its supervisor starts it again
    assert (await pair.second.ended(late)).state == image_pb2.JOB_STATE_COMPLETED
    for answer in answers:
        if isinstance(answer, str):
            assert (await pair.second.ended(answer)).state == image_pb2.JOB_STATE_COMPLETED
    assert set(await pair.second.listed()) == {running, late, *(job for job in answers if isinstance(job, str))}


async def test_a_scheduler_without_the_bucket_is_replaced_by_a_gateway_that_has_it(
    pictures: str, s3_servers: S3Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bottega.gateway.scheduler_lease._NO_PICTURES_S", 1.0)
    with new_database() as url, failing_proxy(s3_servers.get("nanio")) as proxy:
        set_environment(monkeypatch, proxy.url)
        async with running_gateway(jobs=url, name="first", objects=pictures) as first:
            set_environment(monkeypatch, s3_servers.get("nanio").url)
            async with running_gateway(jobs=url, name="second", objects=pictures) as second:
                proxy.failing = 1.0
                first.gateway._storage.report_failure(StorageUnavailable("as a picture finds out"))
                await eventually(lambda: second.gateway._role.serves)
                await eventually(lambda: bool(first.gateway.failed and first.gateway.failed.done()))
    assert any("is asked to become the scheduler" in line.message for line in caplog.records)


async def test_a_scheduler_without_the_bucket_stays_while_no_other_has_it(
    pictures: str, s3_servers: S3Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.gateway.scheduler_lease._NO_PICTURES_S", 0.5)
    nanio, asks = s3_servers.get("nanio"), "SELECT asks_for_another FROM scheduler_lease"
    with new_database() as url, failing_proxy(nanio) as proxy, failing_proxy(nanio) as other:
        set_environment(monkeypatch, proxy.url)
        async with running_gateway(jobs=url, name="first", objects=pictures) as first:
            set_environment(monkeypatch, other.url)
            async with running_gateway(jobs=url, name="second", objects=pictures) as second:
                proxy.failing = other.failing = 1.0
                first.gateway._storage.report_failure(StorageUnavailable("as a picture finds out"))
                await eventually(lambda: execute(url, asks) == [(True,)])
                await first.until_serving(False)
                await asyncio.sleep(2.5)  # the other one looks each second
                assert (first.gateway._role.serves, second.gateway._role.held) == (True, False)
                proxy.failing = 0.0
                await first.until_serving()
                await eventually(lambda: execute(url, asks) == [(False,)])


async def test_a_gateway_with_other_pictures_does_not_start_beside_another(
    pictures: str, caplog: pytest.LogCaptureFixture
) -> None:
    with new_database() as url:
        async with running_gateway(jobs=url) as first:
            assert "no other gateway can go on" in caplog.text
            for objects in ("", pictures):  # with the name that it has without a configuration
                with pytest.raises(ConfigError, match=f"the gateway gateway at {first.address} has"):
                    async with running_gateway(jobs=url, objects=objects):
                        pass


@pytest.mark.parametrize("dies", ["follower", "scheduler"])
async def test_a_stored_job_outlives_the_gateways_that_admit_it(dies: str, pair: Pair) -> None:
    """The one that dies does so when the job is stored, and neither the scheduler nor the caller knows that."""
    with psycopg.connect(pair.database) as holding:
        holding.execute("LOCK TABLE jobs IN EXCLUSIVE MODE")  # so that the follower has a place, and waits
        submitting = asyncio.create_task(pair.second.submit("job"))
        await eventually(lambda: asyncio.to_thread(_waits_for_a_lock, pair.database))
        pair.first.process.send_signal(signal.SIGSTOP)
        holding.rollback()
    await eventually(lambda: asyncio.to_thread(_is_stored, pair.database, goes_on=dies == "follower"))
    if dies == "follower":
        await pair.second.kill()
        pair.first.process.send_signal(signal.SIGCONT)
        with pytest.raises(grpc.aio.AioRpcError):
            await submitting
    else:
        await pair.first.kill()
        assert await submitting
    alive = pair.first if dies == "follower" else pair.second
    await eventually(lambda: bool(pair.worker.begun))  # before anyone asks for it
    job_id = await alive.submit("job")  # the same request
    assert (await alive.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED
    assert await alive.listed() == [job_id]
    assert [job for job, _ in pair.worker.begun] == [job_id]


def _waits_for_a_lock(url: str) -> bool:
    query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return bool(execute(url, query))


def _is_stored(url: str, *, goes_on: bool) -> bool:
    """Whether there is a job. goes_on: the frozen scheduler keeps its lease, however slow this machine is."""
    if goes_on:
        query = f"UPDATE scheduler_lease SET expires_at = clock_timestamp() + interval '{1.9 * LEASE_S} s'"
        execute(url, query)
    return bool(execute(url, "SELECT job_id FROM jobs"))
