"""The PostgreSQL job store: the lease that fences it, clocks, and faults of a real server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.clocks import SharedClock
from bottega.errors import QuotaExceeded, StorageUnavailable
from bottega.gateway.jobs.store import JobRecord, StaleGeneration, postgresql
from bottega.gateway.jobs.store.postgresql import PostgresJobStore
from bottega.gateway.jobs.store.postgresql_outbox import insert_event
from bottega.gateway.jobs.store.postgresql_schema import MIGRATIONS
from bottega.gateway.jobs.store.postgresql_statements import _USED
from bottega.gateway.jobs.store.quotas import DAY_S
from bottega.gateway.jobs.values import StoredImage
from bottega.gateway.scheduler_lease import create_table
from bottega.rpc.security.tenant_file import Quotas
from bottega.storage.postgresql import PostgresDatabase
from bottega.v1.image_pb2 import JOB_STATE_COMPLETED
from tests.support import full_disk
from tests.support.job_store_backends import answered, completed, failed, record, running, sample_event
from tests.support.postgresql import PostgresServer, execute, running_server
from tests.support.waiting import eventually

HOUR_S = 3600.0
_STORED = """
    SELECT (SELECT coalesce(sum(picture_bytes), 0) FROM jobs), count(*), coalesce(sum(bytes), 0) FROM stored
"""
MIB = 1 << 20


@contextlib.asynccontextmanager
async def _opened(url: str, clock: SharedClock | None = None) -> AsyncIterator[PostgresJobStore]:
    store = _store(url, clock)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


def _store(url: str, clock: SharedClock | None = None) -> PostgresJobStore:
    database = PostgresDatabase(url, application="bottega test", max_connections=4)
    return PostgresJobStore(database, clock=clock or SharedClock())


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server for faults, whose commits wait for the disk."""
    with running_server(durable=True) as server:
        yield server


async def _create_lease(url: str) -> None:
    database = PostgresDatabase(url, application="lease", max_connections=1)
    await database.open()
    await create_table(database)
    await database.close()


def _lease(generation: int) -> str:
    return f"UPDATE scheduler_lease SET generation = {generation}, address = 'a:1'"


async def test_a_gateway_that_lost_the_lease_writes_nothing_more(url: str) -> None:
    async with _opened(url) as old, _opened(url) as new:
        await old.add(record("j1"))
        await _create_lease(url)
        execute(url, _lease(7))
        old.fence(7, "a:1")
        assert old.generation == 7
        assert await old.update("j1", running(1))
        await old.add(record("j2"))
        execute(url, _lease(9))
        new.fence(9, "a:1")
        before = await new.page(size=9)
        for write in (
            old.add(record("j3")),
            old.update("j1", completed(1, ended_wall=2.0)),
            old.delete("j2", steady=1.0),
            old.outbox.remove(["e"]),
            old.probe(),
        ):
            with pytest.raises(StaleGeneration) as raised:
                await write
            assert raised.value.metadata["cause"] == "STALE_GENERATION"
        assert await old.page(size=9) == await new.page(size=9) == before, "it still reads"
        assert await new.update("j1", completed(1, ended_wall=2.0))


async def test_a_follower_adds_jobs_only_while_the_lease_is_the_one_it_knows(url: str) -> None:
    async with _opened(url) as scheduler:
        await _create_lease(url)
        execute(url, _lease(7))
        scheduler.fence(7, "a:1")
        follower = _store(url)
        await follower.follow()
        try:
            added = await follower.add(record("j1"), lease=(7, "a:1"))
            assert await scheduler.get("j1") == added
            for lease in ((6, "a:1"), (7, "b:1"), (8, "a:1")):
                with pytest.raises(StaleGeneration):
                    await follower.add(record("j2"), lease=lease)
            with pytest.raises(StorageUnavailable):
                await follower.update("j1", running(1))  # only the scheduler changes jobs
            assert await scheduler.page(size=9) == [added]
        finally:
            await follower.close()


async def test_a_take_over_waits_for_a_write_that_has_begun(url: str) -> None:
    async with _opened(url) as store:
        await store.add(record("j1"))
        await _create_lease(url)
        execute(url, _lease(7))
        store.fence(7, "a:1")
        async with store._write():  # a transaction that has passed the check
            await asyncio.to_thread(execute, url, "UPDATE scheduler_lease SET expires_at = now()")  # it can be extended
            taking = asyncio.create_task(asyncio.to_thread(execute, url, "UPDATE scheduler_lease SET generation = 8"))
            await eventually(lambda: taking.done() or bool(execute(url, "SELECT 1 FROM pg_locks WHERE NOT granted")))
            assert not taking.done()
        await taking
        with pytest.raises(StaleGeneration):
            await store.probe()


async def test_gateways_that_add_jobs_at_once_keep_a_quota_together(url: str) -> None:
    quotas, now = Quotas(per_minute=5), time.time()
    async with _opened(url) as first, _opened(url) as second:
        adding = [
            (first, second)[number % 2].add(replace(record(f"j{number}"), created_wall=now), quotas=quotas)
            for number in range(20)
        ]
        ends = await asyncio.gather(*adding, return_exceptions=True)
        added = [end for end in ends if isinstance(end, JobRecord)]
        assert len(added) == 5
        assert sum(isinstance(end, QuotaExceeded) for end in ends) == 15
        for job in added:  # a tenant that deletes its jobs has no more of them in a minute
            await first.update(job.job_id, failed(ended_wall=now))
            assert await second.delete(job.job_id, steady=now) is not None
        with pytest.raises(QuotaExceeded) as refused:
            await second.add(replace(record("late"), created_wall=now), quotas=quotas)
        assert refused.value.retry_after_s == pytest.approx(60.0)
        await second.add(replace(record("later"), created_wall=now + 61), quotas=quotas)


async def test_a_quota_of_a_day_does_not_count_all_jobs_of_the_day(url: str) -> None:
    quotas, now = Quotas(per_day=5), time.time()
    async with _opened(url) as first, _opened(url) as second:
        for number in range(5):
            added = await (first, second)[number % 2].add(
                replace(record(f"j{number}"), created_wall=now), quotas=quotas
            )
            await first.update(added.job_id, failed(ended_wall=now))
            await second.delete(added.job_id, steady=now)
        with pytest.raises(QuotaExceeded):
            await second.add(replace(record("late"), created_wall=now), quotas=quotas)
        assert (await first.usage("", now_wall=now)).jobs_today == 5
        assert len(execute(url, "SELECT backend FROM days")) <= 8, "a row for each connection"
        await second.add(replace(record("later"), created_wall=now + 3 * DAY_S), quotas=quotas)
        assert execute(url, "SELECT sum(jobs) FROM days") == [(1,)], "earlier days are forgotten"


async def test_an_upgrade_counts_the_jobs_of_the_day(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    day = int(now // DAY_S)
    monkeypatch.setattr(postgresql, "MIGRATIONS", MIGRATIONS[:2])
    async with _opened(url) as older:
        for number in range(3):
            await older.add(replace(record(f"j{number}"), created_wall=now))
        execute(url, f"INSERT INTO removed_days VALUES ('', {day}, 4)")
        monkeypatch.setattr(postgresql, "MIGRATIONS", MIGRATIONS)
        async with _opened(url) as newer:
            await older.add(replace(record("old"), created_wall=now))
            await newer.add(replace(record("new"), created_wall=now))
            assert (await newer.usage("", now_wall=now)).jobs_today == 9


async def test_stored_bytes_are_exact_and_read_from_a_few_rows(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = StoredImage(digest="a" * 64, size_bytes=10)

    def job(name: str) -> JobRecord:
        return answered(record(name), ended_wall=1.0, images=(replace(picture, latents_bytes=len(name)),))

    def counted() -> int:
        ((jobs, rows, total),) = execute(url, _STORED)
        assert rows <= 8, "one for each connection"
        assert total == jobs
        return int(total)

    monkeypatch.setattr(postgresql, "MIGRATIONS", MIGRATIONS[:3])
    async with _opened(url) as older:
        await asyncio.gather(*(older.add(job(f"old-{number}")) for number in range(9)))
        monkeypatch.setattr(postgresql, "MIGRATIONS", MIGRATIONS)
        async with _opened(url) as newer:
            before = counted()
            await asyncio.gather(
                *((older, newer)[number % 2].add(job(f"new-{number}")) for number in range(40)),
                *(older.delete(f"old-{number}", steady=1.0) for number in range(4)),
                newer.forget(ended_before=0.0, max_jobs=5, max_bytes=MIB, limit=3),
            )
            end = completed(1, ended_wall=2.0, images=(picture,))
            for number in range(20):
                await newer.add(record(f"run-{number}"))
                await older.update(f"run-{number}", running(1))
            ending = ((older, newer)[number % 2].update(f"run-{number}", end) for number in range(20))
            assert all(await asyncio.gather(*ending))
            assert counted() > before > 0
            quotas = Quotas(stored_bytes=counted() + 1)
            await newer.add(job("last"), quotas=quotas)
            with pytest.raises(QuotaExceeded):
                await older.add(job("beyond"), quotas=quotas)
            plan = str(execute(url, "EXPLAIN SELECT " + _USED["stored_bytes"] % {"tenant": "''"}))
            assert "on stored" in plan
            assert "jobs" not in plan
            await newer.forget(ended_before=9.0, max_jobs=0, max_bytes=0, limit=999)
            assert counted() == 0


async def test_gateways_whose_clocks_differ_by_an_hour_agree_on_the_time(url: str) -> None:
    clocks = [SharedClock(wall=lambda: time.time() - HOUR_S), SharedClock(wall=lambda: time.time() + HOUR_S)]
    assert clocks[1]() - clocks[0]() > HOUR_S
    async with _opened(url, clocks[0]), _opened(url, clocks[1]) as late:
        assert abs(clocks[1]() - clocks[0]()) < HOUR_S / 60
        assert abs(clocks[1]() - time.time()) < HOUR_S / 60, "the database runs on this machine"
        before = clocks[1]()
        await late.forget(ended_before=0.0, max_jobs=9, max_bytes=MIB, limit=9)
        assert clocks[1]() >= before


async def test_columns_that_a_newer_gateway_has_added_do_not_matter(url: str) -> None:
    async with _opened(url) as store:
        execute(url, "ALTER TABLE jobs ADD COLUMN novelty text NOT NULL DEFAULT 'new'")
        added = await store.add(record("j1"))
        assert await store.update("j1", failed(ended_wall=2.0))
        found = await store.get("j1")
        assert found is not None
        assert (found.sequence, found.live) == (added.sequence, False)
    assert execute(url, "SELECT novelty FROM jobs") == [("new",)]


async def test_events_become_visible_in_the_order_of_their_numbers(url: str) -> None:
    async with _opened(url) as first, _opened(url) as second:
        await second.add(record("j2"))
        async with first._write() as connection:
            await insert_event(connection, sample_event(record("j1")))
            ending = asyncio.create_task(second.update("j2", failed(ended_wall=2.0), event_of=sample_event))
            await eventually(lambda: bool(execute(url, "SELECT 1 FROM pg_locks WHERE NOT granted")))
            assert await first.outbox.places(after=0, limit=9) == [], "a later number is not seen before an earlier one"
        assert await ending
        assert [place.event_id for place in await first.outbox.places(after=0, limit=9)] == ["evt_j1", "evt_j2"]


async def test_a_full_store_counts_its_jobs_after_a_percent_of_new_ones(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "_COUNTED_S", 600.0)
    async with _opened(url) as store:

        async def add(*numbers: int) -> None:
            for number in numbers:
                await store.add(record(f"j{number}"))
                await store.update(f"j{number}", failed(ended_wall=float(number), error=bytes(1000)))

        async def forget(max_bytes: int = MIB) -> int:
            return await store.forget(ended_before=0.0, max_jobs=100, max_bytes=max_bytes, limit=9)

        await add(*range(97))
        assert await forget() == 0
        await add(97, 98, 99)
        assert await forget() == 0
        await add(100)
        assert await forget() == 1
        assert await forget() == 0
        await add(101)
        assert await forget() == 0, "one more than allowed is not noticed yet"
        await add(102)
        assert await forget() == 2
        assert await forget() == 0
        monkeypatch.setattr(postgresql, "_COUNTED_S", 0.0)
        assert await forget(2 * MIB) == 0, "other bounds are counted, and that is valid for no time"
        await add(103)
        assert await forget(2 * MIB) == 1


async def test_a_progress_does_not_write_a_long_prompt_again(url: str) -> None:
    async with _opened(url) as store:
        await store.add(record("j1", spec=bytes(range(256)) * 1000))
        (toast,) = execute(url, "SELECT reltoastrelid::regclass::text FROM pg_class WHERE relname = 'jobs'")
        before = execute(url, f"SELECT ctid FROM {toast[0]}")
        assert await store.update("j1", running(1))
        assert execute(url, f"SELECT ctid FROM {toast[0]}") == before


async def test_jobs_are_neither_lost_nor_doubled_by_kills_of_the_server(server: PostgresServer) -> None:
    url = server.url(server.new_database())
    acknowledged: dict[str, str] = {}
    async with _opened(url) as one, _opened(url) as two:
        stop = asyncio.Event()
        writers = [
            asyncio.create_task(_write_jobs(store, f"w{number}", acknowledged, stop))
            for number, store in enumerate((one, two, one, two))
        ]
        for _ in range(2):
            before = len(acknowledged)
            await eventually(lambda before=before: len(acknowledged) > before + 20)  # type: ignore[misc]
            server.kill()
            await asyncio.sleep(0.1)  # some calls find no server
            server.start()
        await eventually(lambda: "completed" in acknowledged.values())
        stop.set()
        await asyncio.gather(*writers)
        jobs = await one.page(size=100_000)
        assert len({job.request_id for job in jobs}) == len(jobs), "a request is drawn once"
        for job_id, what in acknowledged.items():
            found = await two.get(job_id)
            assert found is not None, f"{job_id} was acknowledged and is lost"
            assert what == "added" or found.state == JOB_STATE_COMPLETED
            assert found == await one.of_request(f"request of {job_id}")


async def _write_jobs(store: PostgresJobStore, prefix: str, acknowledged: dict[str, str], stop: asyncio.Event) -> None:
    """Add and complete jobs, and repeat what failed, until `stop` is set."""
    number = 0
    while not stop.is_set():
        job_id, number = f"{prefix}-{number}", number + 1
        await _until_written(store.add, record(job_id, request_id=f"request of {job_id}"))
        acknowledged[job_id] = "added"
        await _until_written(store.update, job_id, running(1))
        await _until_written(store.update, job_id, completed(1, ended_wall=2.0))
        acknowledged[job_id] = "completed"


async def _until_written(write: object, *arguments: object) -> None:
    while True:
        with contextlib.suppress(StorageUnavailable):
            await write(*arguments)  # type: ignore[operator]
            return
        await asyncio.sleep(0.05)


async def test_a_database_that_becomes_read_only_is_read_and_heals(server: PostgresServer) -> None:
    name = server.new_database()
    end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND pid <> pg_backend_pid()"
    async with _opened(server.url(name)) as store:
        added = await store.add(record("j1"))
        server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        server.execute(end)
        with pytest.raises(StorageUnavailable, match="read-only") as raised:
            await _retried(store, "j2")
        assert raised.value.retry_after_s is not None
        assert await store.get("j1") == added
        starting = _store(server.url(name))
        with pytest.raises(StorageUnavailable, match="read-only"):
            await starting.open()
        assert await starting.page(size=9) == [added], "a start reads as far as it can"
        await starting.close()
        server.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        server.execute(end)
        await _until_written(store.add, record("j2"))
        assert [job.job_id for job in await store.live()] == ["j1", "j2"]


async def _retried(store: PostgresJobStore, job_id: str) -> None:
    """Add a job; again while only connections are lost."""
    while True:
        try:
            await store.add(record(job_id))
        except StorageUnavailable as error:
            if error.metadata["cause"] not in {"AdminShutdown", "ECONNRESET"}:
                raise
        else:
            return


async def test_a_full_disk_of_the_database_is_said_reads_go_on_and_it_heals(server: PostgresServer) -> None:
    with full_disk.small_disk(server.folder / "disk", size_bytes=24 * MIB) as disk:
        server.own(disk)
        server.execute(f"CREATE TABLESPACE small LOCATION '{disk}'")
        try:
            server.execute("CREATE DATABASE on_small TABLESPACE small TEMPLATE template0")
            await _fill_and_heal(server.url("on_small"), disk)
        finally:
            server.execute("DROP DATABASE IF EXISTS on_small WITH (FORCE)")
            server.execute("DROP TABLESPACE small")


async def _fill_and_heal(url: str, disk: Path) -> None:
    async with _opened(url) as store:
        added = await store.add(record("j1", request_id="r1"))
        ballast = full_disk.fill(disk)
        for number in range(2):
            with pytest.raises(StorageUnavailable, match="disk is full") as raised:
                await store.add(record(f"big{number}"), inputs=bytes(range(256)) * 4096)
            assert str(disk) not in raised.value.message
        assert await store.get("j1") == await store.of_request("r1") == added
        ballast.unlink()
        await store.add(record("big0"), inputs=bytes(range(256)) * 4096)
        assert [job.job_id for job in await store.live()] == ["j1", "big0"]
