"""The scheduler's lease in a real PostgreSQL: one holder at a time, whatever the gateways do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import psycopg
import pytest

from bottega.errors import ConfigError, DataLoss, StorageUnavailable
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.scheduler_lease import SchedulerLease
from bottega.gateway.scheduler_role import SchedulerRole
from bottega.storage.postgresql import PostgresDatabase
from bottega.v1 import image_pb2
from tests.support.postgresql import execute, running_server
from tests.support.running_gateway import running_gateway
from tests.support.waiting import eventually

# So short that tests do not wait long, and many times longer than a query.
_LEASE_S = 1.0
_PICTURES = "s3://bucket/pictures"


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """As much of a gateway as the lease needs."""

    lease: SchedulerLease
    role: SchedulerRole


@contextlib.asynccontextmanager
async def _gateway(
    url: str, name: str, *, lease_s: float = _LEASE_S, probe: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[Gateway]:
    database, role = PostgresDatabase(url, application=f"lease of {name}", max_connections=1), SchedulerRole()
    storage = SimpleNamespace(images=SimpleNamespace(probe=probe), images_failed_s=0.0)
    lease = SchedulerLease(
        *(database, role),
        name=name,
        objects=_PICTURES,
        lease_s=lease_s,
        storage=cast("Storage", storage) if probe else None,
    )
    lease.address = f"{name}:8470"
    # As a gateway does: PostgreSQL may be busy for longer than the bound on a connection or a lock.
    await eventually(lambda: _starts(lease))
    try:
        yield Gateway(lease=lease, role=role)
    finally:
        await lease.close()


async def _starts(lease: SchedulerLease) -> bool:
    with contextlib.suppress(StorageUnavailable):
        await lease.start()
        return True
    return False


async def test_one_of_many_gateways_takes_a_free_lease(url: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        leases = await asyncio.gather(
            *(stack.enter_async_context(_gateway(url, f"g{n}", lease_s=60)) for n in range(6))
        )
        await eventually(lambda: all(lease.role.holder is not None for lease in leases))
        (scheduler,) = [lease for lease in leases if lease.role.held]
        assert {lease.role.holder for lease in leases} == {scheduler.role.holder}
        assert scheduler.role.holder is not None
        assert (scheduler.role.holder.generation, scheduler.role.holder.address) == (1, scheduler.lease.address)


async def test_a_gateway_that_is_too_old_for_the_jobs_does_not_start_as_a_follower(url: str) -> None:
    async with _gateway(url, "a"):
        with psycopg.connect(url) as connection:
            connection.execute("INSERT INTO bottega_migrations VALUES ('jobs', 90, 90)")
        with pytest.raises(ConfigError, match="from a newer version of Bottega"):
            async with _gateway(url, "b"):
                pass


async def test_a_renewed_lease_stays_with_its_holder(url: str) -> None:
    async with _gateway(url, "a", lease_s=5) as first:
        await eventually(lambda: first.role.held)
        async with _gateway(url, "b", lease_s=5) as second:
            for _ in range(2):
                before = execute(url, "SELECT expires_at FROM scheduler_lease")
                await eventually(lambda before=before: execute(url, "SELECT expires_at FROM scheduler_lease") > before)  # type: ignore[misc]
            assert (first.role.held, second.role.held) == (True, False)


async def test_a_follower_takes_the_lease_of_a_gateway_that_died(url: str) -> None:
    async with _gateway(url, "b") as second:
        async with _gateway(url, "a") as first:  # it ends without a release, as after kill -9
            await eventually(lambda: first.role.held or second.role.held)
        await eventually(lambda: second.role.held)
        assert second.role.holder is not None
        assert second.role.holder.name == "b"


async def test_a_gateway_ends_though_the_lease_changes_in_that_moment(url: str) -> None:
    """Python 3.11's asyncio.wait_for forgets that it was cancelled if what it waits for ends just then."""
    for turns in range(4):
        async with _gateway(url, "a", lease_s=60) as gateway:
            await asyncio.sleep(0.2)  # it waits for a change
            gateway.lease._wake.set()
            for _ in range(turns):
                await asyncio.sleep(0)


async def test_a_gateway_ends_though_its_probe_succeeds_in_that_moment(url: str) -> None:
    """As above, where what it waits for is the probe of the pictures."""
    probed, ended = asyncio.Event(), asyncio.Event()

    async def probe() -> None:
        probed.set()
        await ended.wait()

    async with _gateway(url, "a", lease_s=3600) as first:
        await eventually(lambda: first.role.held)
    for turns in range(4):
        execute(url, "UPDATE scheduler_lease SET asks_for_another = true")
        async with _gateway(url, "b", lease_s=3600, probe=probe):
            await probed.wait()
            ended.set()
            for _ in range(turns):
                await asyncio.sleep(0)
        probed.clear()
        ended.clear()


async def test_the_lease_of_a_dead_scheduler_that_asked_for_another_is_taken_without_a_probe(url: str) -> None:
    probed = asyncio.Event()

    async def probe() -> None:
        probed.set()

    async with _gateway(url, "a") as first:
        await eventually(lambda: first.role.held)
    execute(url, "UPDATE scheduler_lease SET asks_for_another = true, expires_at = now()")
    async with _gateway(url, "b", probe=probe) as second:
        await eventually(lambda: second.role.held)
        assert not probed.is_set()


async def test_a_follower_whose_pictures_are_damaged_does_not_take_over(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    probed = asyncio.Event()

    async def probe() -> None:
        probed.set()
        raise DataLoss("the bucket is damaged")

    async with _gateway(url, "a", lease_s=3600) as first:
        await eventually(lambda: first.role.held)
    execute(url, "UPDATE scheduler_lease SET asks_for_another = true")
    async with _gateway(url, "b", lease_s=3600, probe=probe) as second:
        await probed.wait()
        await eventually(lambda: second.role.holder is not None)
        assert not second.role.held
    assert "lease cannot be read" not in caplog.text, "damaged pictures say nothing of the database"


async def test_a_released_lease_is_taken_without_waiting_for_its_end(url: str) -> None:
    async with _gateway(url, "a", lease_s=3600) as first:
        await eventually(lambda: first.role.held)
        async with _gateway(url, "b", lease_s=3600) as second:
            await eventually(lambda: second.role.holder is not None)
            await first.lease.release()
            await eventually(lambda: second.role.held)
            await eventually(lambda: first.role.holder == second.role.holder)
            assert not first.role.held


async def test_a_renewal_that_waits_does_not_undo_a_release(url: str) -> None:
    async with _gateway(url, "a", lease_s=5) as first:
        await eventually(lambda: first.role.held)
        async with await psycopg.AsyncConnection.connect(url) as connection:
            await connection.execute("SELECT 1 FROM scheduler_lease FOR UPDATE")
            release = asyncio.create_task(first.lease.release())
            await asyncio.sleep(1.5)  # the next renewal is due after one second
        await release
        await asyncio.sleep(0.2)
        ended = "SELECT expires_at <= clock_timestamp() FROM scheduler_lease"
        assert execute(url, ended) == [(True,)]


async def test_a_holder_is_lost_if_a_standby_gave_its_generation_to_another_gateway(url: str) -> None:
    async with _gateway(url, "a") as first:
        await eventually(lambda: first.role.held)
        other = "UPDATE scheduler_lease SET name = 'other', address = 'other:8470'"
        execute(url, other)
        await eventually(lambda: first.role.lost)


async def test_a_lease_of_a_clock_that_was_ahead_is_taken(url: str) -> None:
    async with _gateway(url, "a") as first:
        await eventually(lambda: first.role.held)
    execute(url, "UPDATE scheduler_lease SET expires_at = now() + interval '1 hour'")
    async with _gateway(url, "b") as second:
        await eventually(lambda: second.role.held)


async def test_a_holder_whose_lease_was_taken_is_lost(url: str) -> None:
    async with _gateway(url, "a") as first:
        await eventually(lambda: first.role.held)
        execute(url, "UPDATE scheduler_lease SET generation = generation + 1, name = 'other'")
        await eventually(lambda: first.role.lost)
        assert not first.role.held
        await asyncio.sleep(2 * _LEASE_S)
        assert not first.role.held


async def test_a_restarted_database_changes_no_holder() -> None:
    with running_server() as server:
        url = server.url(server.new_database())
        async with _gateway(url, "a") as first, _gateway(url, "b") as second:
            await eventually(lambda: first.role.holder is not None and first.role.holder == second.role.holder)
            server.restart()
            await asyncio.sleep(2 * _LEASE_S)
            await eventually(lambda: first.role.holder is not None and first.role.holder == second.role.holder)
            assert [first.role.held, second.role.held].count(True) == 1
            assert not (first.role.lost and second.role.lost)


async def test_a_scheduler_ends_in_a_long_outage_and_the_restarted_one_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As systemd starts it again: a second process on the same address.
    monkeypatch.setattr("bottega.gateway.scheduler_lease._CUT_OFF_S", _LEASE_S / 2)
    with running_server() as server:
        url = server.url(server.new_database())
        async with running_gateway(jobs=url) as house:
            await house.worker(hold_at=1)
            before = (await house.submit(prompt="before")).job_id
            server.stop()
            assert house.gateway.failed is not None
            error = await asyncio.shield(house.gateway.failed)
            assert not isinstance(error, ConfigError), "systemd does not start it again after a wrong configuration"
        async with running_gateway(jobs=url, starting=True) as house:
            await asyncio.sleep(_LEASE_S)
            assert not await house.is_serving()
            server.start()
            await house.until_serving()
            await house.worker()
            assert (await house.ended(before)).state == image_pb2.JOB_STATE_COMPLETED


async def test_a_resting_gateway_makes_few_queries(url: str) -> None:
    count = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
    async with _gateway(url, "a", lease_s=3.5) as first, _gateway(url, "b", lease_s=3.5) as second:
        await eventually(lambda: first.role.holder is not None and first.role.holder == second.role.holder)
        await asyncio.sleep(1.5)
        ((before,),) = execute(url, count)
        await asyncio.sleep(4.0)
        ((after,),) = execute(url, count)
    # Two gateways in 4 s, of which each may make 5 a second.
    assert after - before < 2 * 4 * 5
