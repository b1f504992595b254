"""Gateways in processes of their own that share their jobs in a real PostgreSQL, as their callers see them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import psycopg
import pytest

from bottega.client.suite.plan import free_ports
from bottega.errors import StorageUnavailable
from bottega.gateway.scheduler_lease import LEASE_S
from bottega.rpc.channel import open_channel
from bottega.v1 import image_pb2, image_pb2_grpc, worker_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.postgresql import new_database, shared_server
from tests.support.running_gateway import running_gateway
from tests.support.s3 import S3Server, S3Servers, failing_proxy, set_environment
from tests.support.services import Service, Services, gateway_config
from tests.support.waiting import eventually

_HELD_AT = 3


class Gateway:
    """One of them, always at the same addresses, and a client of it."""

    def __init__(self, services: Services, name: str, jobs: str, folder: Path, *, objects: str) -> None:
        self._services = services
        self.name = name
        self.address, self.fleet = (f"127.0.0.1:{port}" for port in free_ports(2))
        self._config = gateway_config(
            name=name,
            jobs=jobs,
            objects=objects,
            server={"listen": self.address, "metrics_listen": "127.0.0.1:0"},
            fleet={"listen": self.fleet},
            state=str(folder / name),
        )
        self.service: Service | None = None
        self._channel = open_channel(self.address)
        self.images: image_pb2_grpc.ImageServiceAsyncStub = image_pb2_grpc.ImageServiceStub(self._channel)

    @property
    def process(self) -> Any:
        assert self.service is not None
        return self.service.process

    async def start(self) -> None:
        self.service = await asyncio.to_thread(self._services.start, "gateway", self._config, name=self.name)

    async def stop(self) -> int:
        assert self.service is not None
        return await asyncio.to_thread(self.service.stop)

    async def kill(self) -> None:
        assert self.service is not None
        await asyncio.to_thread(self.service.kill)

    def logged(self, event: str) -> int:
        """How often it has logged this, in the life that the log is of."""
        assert self.service is not None
        return sum(line.get("event") == event for line in self.service.events())

    async def submit(self, request_id: str = "", *, within_s: float = 30) -> str:
        request = image_pb2.SubmitJobRequest(request_id=request_id, spec=GenerationSpec(prompt="a star"))
        return (await self.images.SubmitJob(request, timeout=within_s)).job.job_id

    async def job(self, job_id: str) -> image_pb2.Job:
        return (await self.images.GetJob(image_pb2.GetJobRequest(job_id=job_id), timeout=30)).job

    async def listed(self) -> list[str]:
        answer = await self.images.ListJobs(image_pb2.ListJobsRequest(), timeout=30)
        return [job.job_id for job in answer.jobs]

    async def ended(self, job_id: str) -> image_pb2.Job:
        """Watches a job here to its end; the job then."""
        async for _ in self.images.WatchJob(image_pb2.WatchJobRequest(job_id=job_id), timeout=60):
            pass
        return await self.job(job_id)

    async def close(self) -> None:
        await self._channel.close()


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two gateways of one database; the first is the scheduler. The worker has joined both."""

    first: Gateway
    second: Gateway
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
        first, second = (Gateway(services, name, url, tmp_path, objects=pictures) for name in ("first", "second"))
        worker = ScriptedWorker("w1", f"{first.fleet},{second.fleet}")
        try:
            await first.start()
            await second.start()
            await worker.start(join_timeout_s=30)
            await eventually(lambda: _serves(first), "the first gateway to know the worker")
            await eventually(lambda: _serves(second), "the second gateway to know the worker")
            bucket = s3_servers.get("nanio")
            yield Pair(first=first, second=second, worker=worker, database=url, bucket=bucket, objects=pictures)
        finally:
            for gateway in (first, second):
                with contextlib.suppress(ProcessLookupError, AssertionError):
                    gateway.process.send_signal(signal.SIGCONT)
                await gateway.close()
            await worker.die()


async def _serves(gateway: Gateway) -> bool:
    return bool((await gateway.images.ListModels(image_pb2.ListModelsRequest(), timeout=30)).models)


async def test_every_gateway_accepts_lists_watches_and_cancels(pair: Pair) -> None:
    jobs = [await pair.first.submit(), await pair.second.submit()]
    for gateway in (pair.first, pair.second):
        assert [(await gateway.ended(job)).state for job in jobs] == [image_pb2.JOB_STATE_COMPLETED] * 2
        assert sorted(await gateway.listed()) == sorted(jobs)
    pair.worker.script.hold_at = _HELD_AT
    for cancelling, other in ((pair.first, pair.second), (pair.second, pair.first)):
        job_id = await other.submit()
        await eventually(lambda job_id=job_id: _is_running(pair.second, job_id))  # type: ignore[misc]
        await cancelling.images.CancelJob(image_pb2.CancelJobRequest(job_id=job_id), timeout=30)
        assert (await other.job(job_id)).state == image_pb2.JOB_STATE_CANCELLED


async def test_a_killed_scheduler_is_replaced_and_its_jobs_go_on(pair: Pair) -> None:
    pair.worker.script.hold_at = _HELD_AT
    running = await pair.first.submit("running")
    await eventually(lambda: _is_running(pair.first, running))
    waiting = [await pair.second.submit(f"waiting-{number}") for number in range(3)]
    watched = asyncio.create_task(pair.second.ended(running))
    began = asyncio.get_running_loop().time()
    await pair.first.kill()
    late = await pair.second.submit("late")  # it waits for the next scheduler
    assert asyncio.get_running_loop().time() - began < 10 * LEASE_S
    pair.worker.script.release.set()
    assert (await watched).state == image_pb2.JOB_STATE_COMPLETED
    for job_id in (running, *waiting, late):
        assert (await pair.second.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED
    assert pair.worker.begun.count((running, pair.worker.begun[0][1])) == 1
    assert sorted({job for job, _ in pair.worker.begun}) == sorted([running, *waiting, late])
    assert len(pair.worker.begun) == 5  # no attempt began again


@pytest.mark.parametrize("moment", ["before", "during"])
async def test_a_follower_that_stops_around_a_takeover_ends(moment: str, pair: Pair) -> None:
    pair.worker.script.hold_at = _HELD_AT
    job_id = await pair.first.submit()
    await eventually(lambda: _is_running(pair.first, job_id))
    await pair.first.kill()
    if moment == "during":
        await eventually(lambda: pair.second.logged("this gateway is the scheduler") == 1)
    assert await pair.second.stop() == 0
    await pair.first.start()
    pair.worker.script.release.set()
    assert (await pair.first.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def test_a_job_goes_on_from_its_checkpoint_after_a_host_is_lost(pair: Pair) -> None:
    pair.worker.script.hold_at = 20
    running = await pair.first.submit("running")
    await asyncio.wait_for(pair.worker.arrived.wait(), 30)
    attempt = pair.worker.requests[0].attempt
    await pair.worker.checkpoints.put(
        worker_pb2.WatchCheckpointsResponse(attempt=attempt, steps_done=15, checkpoint=b"15")
    )
    await eventually(lambda: bool(pair.checkpoints()))
    await pair.first.kill()  # with the worker, as when their machine fails
    await pair.worker.die()
    other = ScriptedWorker("w2", f"{pair.first.fleet},{pair.second.fleet}")
    try:
        await other.start(join_timeout_s=30)
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
    await eventually(lambda: _is_running(pair.first, running))
    pair.first.process.send_signal(signal.SIGSTOP)
    # It hangs at the frozen gateway, until the next scheduler is known: long before its deadline.
    late = await pair.second.submit("late", within_s=4 * LEASE_S)
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
    with new_database() as url, failing_proxy(s3_servers.get("nanio")) as proxy:
        set_environment(monkeypatch, proxy.url)
        async with (
            running_gateway(jobs=url, name="first", objects=pictures) as first,
            running_gateway(jobs=url, name="second", objects=pictures) as second,
        ):
            proxy.failing = 1.0
            first.gateway._storage.report_failure(StorageUnavailable("as a picture finds out"))
            asks = "SELECT asks_for_another FROM scheduler_lease"
            await eventually(lambda: shared_server().execute(asks, database=urlsplit(url).path[1:]) == [(True,)])
            await first.until_serving(False)
            await asyncio.sleep(2.5)  # the other one looks each second
            assert (first.gateway._role.serves, second.gateway._role.held) == (True, False)
            proxy.failing = 0.0
            await first.until_serving()
            await eventually(lambda: shared_server().execute(asks, database=urlsplit(url).path[1:]) == [(False,)])


async def test_a_gateway_with_other_pictures_does_not_start_beside_another(tmp_path: Path, pictures: str) -> None:
    with new_database() as url, Services(tmp_path) as services:
        first = Gateway(services, "gateway", url, tmp_path / "one", objects="")
        await first.start()
        assert sum("no other gateway can go on" in line["event"] for line in first.service.events()) == 1  # type: ignore[union-attr]
        for objects in ("", pictures):  # with the name that it has without a configuration
            config = gateway_config(jobs=url, objects=objects, state=str(tmp_path / "two"))
            with pytest.raises(
                AssertionError, match=f"before it served(?s:.)*the gateway gateway at {first.address} has"
            ):
                await asyncio.to_thread(services.start, "gateway", config)
        await first.kill()
        again = Gateway(services, "gateway", url, tmp_path / "one", objects="")
        await again.start()  # it does not take its own lease, which has not ended, for another gateway
        await first.close()
        await again.close()


async def test_a_rolling_restart_refuses_no_call(pair: Pair) -> None:
    done = asyncio.Event()
    jobs: list[str] = []

    async def submit_on() -> None:
        while not done.is_set():
            jobs.append(await pair.second.submit(f"job-{len(jobs)}"))
            await asyncio.sleep(0.05)  # so that the queue has room for all

    submitting = asyncio.create_task(submit_on())
    await eventually(lambda: len(jobs) > 5)
    assert await pair.first.stop() == 0
    count = len(jobs)
    await eventually(lambda: len(jobs) > count + 5)
    done.set()
    await submitting
    for job_id in jobs:
        assert (await pair.second.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED


@pytest.mark.parametrize("dies", ["follower", "scheduler"])
async def test_a_stored_job_outlives_the_gateways_that_admit_it(dies: str, pair: Pair) -> None:
    """The one that dies does so when the job is stored, and neither the scheduler nor the caller knows that."""
    name = urlsplit(pair.database).path[1:]
    with psycopg.connect(pair.database) as holding:
        holding.execute("LOCK TABLE jobs IN EXCLUSIVE MODE")  # so that the follower has a place, and waits
        submitting = asyncio.create_task(pair.second.submit("job", within_s=60))
        await eventually(lambda: asyncio.to_thread(_waits_for_a_lock, name))
        pair.first.process.send_signal(signal.SIGSTOP)
        holding.rollback()
    await eventually(lambda: asyncio.to_thread(_is_stored, name, goes_on=dies == "follower"))
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


def _waits_for_a_lock(database: str) -> bool:
    query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return bool(shared_server().execute(query, database=database))


def _is_stored(database: str, *, goes_on: bool) -> bool:
    """Whether there is a job. goes_on: the frozen scheduler keeps its lease, however slow this machine is."""
    if goes_on:
        query = f"UPDATE scheduler_lease SET expires_at = clock_timestamp() + interval '{1.9 * LEASE_S} s'"
        shared_server().execute(query, database=database)
    return bool(shared_server().execute("SELECT job_id FROM jobs", database=database))


async def test_slow_queries_of_a_follower_cost_time_and_no_job(pair: Pair) -> None:
    """Each insert of a job takes 2 s, as if the database were slow."""
    slow = (
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(2); RETURN NULL; END $$;"
        "CREATE TRIGGER slow BEFORE INSERT ON jobs EXECUTE FUNCTION slow();"
        "CREATE TRIGGER slow BEFORE INSERT OR UPDATE ON request_ids EXECUTE FUNCTION slow()"
    )
    shared_server().execute(slow, database=urlsplit(pair.database).path[1:])
    jobs = await asyncio.gather(*(pair.second.submit(f"job-{number}", within_s=60) for number in range(3)))
    for job_id in jobs:
        assert (await pair.first.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED
    assert sorted(await pair.second.listed()) == sorted(jobs)


async def test_restarted_database_loses_no_job(pair: Pair) -> None:
    accepted = [await pair.second.submit(f"before-{number}") for number in range(2)]
    shared_server().restart()  # here, because a server ends with the thread that has started it
    accepted += [
        await _submit_until_accepted(gateway, f"after-{gateway.name}") for gateway in (pair.first, pair.second)
    ]
    for job_id in accepted:
        assert (await pair.second.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def _submit_until_accepted(gateway: Gateway, request_id: str) -> str:
    accepted = ""

    async def is_accepted() -> bool:
        nonlocal accepted
        with contextlib.suppress(Exception):
            accepted = await gateway.submit(request_id)
        return bool(accepted)

    await eventually(is_accepted)
    return accepted


async def _is_running(gateway: Gateway, job_id: str) -> bool:
    return (await gateway.job(job_id)).state == image_pb2.JOB_STATE_RUNNING
