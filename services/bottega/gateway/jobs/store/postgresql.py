"""The job store of several gateways in one PostgreSQL database.

A change of a job locks its row alone. Every write of a gateway that was the scheduler is refused once another gateway
has taken the lease over (`PostgresJobStore.fence`). Times on the steady clock are those of the database's clock, so
hosts whose clocks differ agree on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from bottega.clocks import SharedClock
from bottega.errors import ConfigError, StorageUnavailable
from bottega.gateway.jobs.store import postgresql_statements as sql
from bottega.gateway.jobs.store.job_store import (
    ALL_JOBS,
    Change,
    EndTime,
    EventOf,
    JobFilter,
    JobRecord,
    NotAdded,
    RemovedJobs,
    StaleGeneration,
    no_event,
)
from bottega.gateway.jobs.store.postgresql_forgetting import forget, totals
from bottega.gateway.jobs.store.postgresql_outbox import PostgresOutbox
from bottega.gateway.jobs.store.postgresql_schema import COMPONENT, MIGRATIONS
from bottega.gateway.jobs.store.quotas import TenantUsage, is_bounded
from bottega.rpc.security.tenant_file import UNBOUNDED, Quotas
from bottega.storage import os_errors
from bottega.storage.postgresql import Connection, PostgresDatabase, lock_call, rows_of
from bottega.storage.postgresql_errors import busy_if_locked

# Upper bound on the wait of a job for other jobs of a tenant that has quotas.
_TURN_S = 10.0
# Tries of an `add` whose request_id other gateways take and free at the same time.
_MAX_CLAIMS = 5
# All jobs are counted again after this time, because records grow when their jobs end.
_COUNTED_S = 30.0
# Share of `max_jobs` by which there may be too many, so that a full store does not count after each new job.
_BEYOND_SHARE = 0.01
_MANY = "many jobs of the tenant are being stored"

ResultT = TypeVar("ResultT")


class PostgresJobStore:
    """A JobStore in a PostgreSQL database, which several gateways may use at the same time.

    Args:
        database: The database; the store opens and closes it.
        clock: Follows the clock of the database while the store is open; jobs expire by it.
        on_commit: Called with the duration of each write in seconds.

    Attributes:
        outbox: The webhook events of its jobs.
    """

    def __init__(
        self,
        database: PostgresDatabase,
        *,
        clock: SharedClock,
        on_commit: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._database = database
        self._on_commit = on_commit
        self._readable = self._writable = False
        self._generation = 0
        self._fence: tuple[int, str] | None = None
        self._clock = clock
        # Only those in use, by tenant.
        self._turns = weakref.WeakValueDictionary[str, asyncio.Lock]()
        # `forget` counts all jobs again above this sequence number, from this time on, or for other bounds.
        self._room_until, self._counts_from, self._counted_bounds = 0, 0.0, (0, 0)
        self.outbox = PostgresOutbox(write=self._write, read=self._read)

    lost = False

    @property
    def generation(self) -> int:
        """Number of this start of the gateway, or of its lease; 0 before `open`."""
        return self._generation

    @property
    def waiting(self) -> int:
        """Number of operations that wait for a connection."""
        return self._database.waiting

    def fence(self, generation: int, address: str) -> None:
        """Refuse every write with StaleGeneration unless the scheduler's lease has this generation and address.

        The generation becomes that of the store. Before the first call nothing is checked.
        """
        self._generation, self._fence = generation, (generation, address)

    async def open(self) -> None:
        """Connect, create missing tables, and count this start of the gateway."""
        if self._writable:
            return
        try:
            await self.open_to_read()
            await self._database.migrate(COMPONENT, MIGRATIONS)
        except ConfigError:
            await self.close()  # nobody tries again, and an open pool keeps the process alive
            raise
        self._readable = True
        if not self._generation:
            ((generation,),) = await self._database.fetch("SELECT nextval('job_generation')")
            self._generation = int(generation)
        self._writable = True

    async def open_to_read(self) -> None:
        """Connect, and read if there are tables."""
        if self._readable:
            return
        await self._database.open()
        await self._follow_clock()
        self._readable = await self._database.has_schema(COMPONENT, MIGRATIONS)

    async def follow(self) -> None:
        """Open the store for a gateway that is not the scheduler, and follow the clock of the database."""
        if not self._readable:
            await self._database.open()
            await self._database.migrate(COMPONENT, MIGRATIONS)
            self._readable = True
        await self._follow_clock()

    async def close(self) -> None:
        """Close all connections."""
        self._readable = self._writable = False
        await self._database.close()

    async def remake(self, live: AsyncIterator[tuple[JobRecord, bytes]]) -> None:
        """Do nothing: the store is never `lost`."""

    async def add(
        self,
        record: JobRecord,
        *,
        inputs: bytes = b"",
        replaces: str = "",
        event_of: EventOf = no_event,
        quotas: Quotas = UNBOUNDED,
        lease: tuple[int, str] | None = None,
    ) -> JobRecord:
        """Insert a job. Jobs of a tenant with quotas are inserted one after the other, whatever their gateway.

        A gateway that is not the scheduler names the scheduler's `lease`, by generation and address: if another gateway
        has taken it meanwhile, that raises StaleGeneration, and nothing is written. Raises NotAdded if the job is
        certainly not stored.
        """
        alone_for = record.tenant if is_bounded(quotas) else None
        commits = False
        try:
            async with self._turn(alone_for):
                for _ in range(_MAX_CLAIMS):
                    with contextlib.suppress(sql.ClaimedMeanwhile):
                        async with self._write(alone_for=alone_for, lease=lease) as connection:
                            added = await sql.add(
                                connection, record, inputs, replaces=replaces, event_of=event_of, quotas=quotas
                            )
                            commits = True
                        return added
            raise os_errors.unavailable("other calls use the same request_id", cause=os_errors.BUSY)
        except StorageUnavailable as error:
            if commits or isinstance(error, StaleGeneration):
                raise
            raise NotAdded(error.message, metadata=error.metadata, retry_after_s=error.retry_after_s) from (
                error.__cause__
            )

    @contextlib.asynccontextmanager
    async def _turn(self, tenant: str | None) -> AsyncIterator[None]:
        """Let the blocks of a tenant run one at a time, so that jobs of one tenant do not hold all connections."""
        if tenant is None:
            yield
            return
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        try:
            async with asyncio.timeout(_TURN_S):
                await turn.acquire()
        except TimeoutError:
            raise os_errors.unavailable(_MANY, cause=os_errors.BUSY) from None
        try:
            yield
        finally:
            turn.release()

    async def update(self, job_id: str, change: Change, *, event_of: EventOf = no_event) -> bool:
        """Apply a change while the job's row is locked."""
        async with self._write() as connection:
            found = await sql.records_of(connection, f"SELECT {sql.ALL} FROM jobs WHERE job_id = %s FOR UPDATE", job_id)
            after = change(found[0]) if found else None
            if after is None:
                return False
            await sql.write_changes(connection, found[0], after, event_of)
            return True

    async def delete(self, job_id: str, *, tenant: str = "", steady: float) -> list[str] | None:
        """Delete an ended job and return its digests; if it was deleted before, return the same digests again."""
        async with self._write() as connection:
            query = f"SELECT {sql.ALL} FROM jobs WHERE job_id = %s AND tenant = %s FOR UPDATE"
            found = await sql.records_of(connection, query, job_id, tenant)
            if not found:
                digests = await sql.deleted_contents(connection, job_id, tenant)
            elif found[0].live:
                return None
            else:
                digests = list(found[0].contents)
                await sql.delete(connection, found[0], digests, steady=steady)
            if digests is None:
                return None
            query = "SELECT DISTINCT digest FROM contents WHERE tenant = %s AND digest = ANY(%s)"
            held = {digest for (digest,) in await rows_of(connection, query, (tenant, digests))}
            return [digest for digest in digests if digest not in held]

    async def was_deleted(self, job_id: str, *, tenant: str = "") -> bool:
        """Return whether a job was deleted."""
        return await self._ask(sql.deleted_contents, job_id, tenant) is not None

    async def get(self, job_id: str, *, tenant: str | None = None) -> JobRecord | None:
        """Read the job with this ID."""
        whose = [] if tenant is None else [tenant]
        found = await self._list("jobs WHERE job_id = %s" + " AND tenant = %s" * len(whose), job_id, *whose)
        return found[0] if found else None

    async def of_request(self, request_id: str, *, tenant: str = "") -> JobRecord | None:
        """Read the newest job with a tenant's request_id."""
        return await self._ask(sql.of_request, request_id, tenant)

    async def usage(self, tenant: str, *, now_wall: float) -> TenantUsage:
        """Count the jobs and bytes of a tenant."""
        return await self._ask(sql.usage_of, tenant, now_wall=now_wall)

    async def with_result(self, result_key: str, *, limit: int) -> list[JobRecord]:
        """Read the newest jobs with a result key."""
        query = "jobs WHERE result_key = %s AND result_key <> '' ORDER BY sequence DESC LIMIT %s"
        return await self._list(query, result_key, limit)

    async def with_kept_picture(self, digest: str, *, tenant: str = "", limit: int) -> list[JobRecord]:
        """Read the newest jobs that keep latents of an image."""
        query = (
            "contents JOIN jobs USING (sequence) "
            "WHERE contents.tenant = %s AND digest = %s AND has_latents ORDER BY jobs.sequence DESC LIMIT %s"
        )
        return await self._list(query, tenant, digest, limit)

    async def inputs(self, job_id: str) -> bytes:
        """Read the inputs of a live job."""
        query = "SELECT data FROM inputs JOIN jobs USING (sequence) WHERE job_id = %s"
        return b"".join(bytes(data) for (data,) in await self._ask(rows_of, query, (job_id,)))

    async def last_end(self) -> EndTime | None:
        """Read the latest end of a job."""
        latest = "WHERE ended_steady IS NOT NULL ORDER BY ended_steady DESC, sequence DESC LIMIT 1"
        rows = await self._ask(rows_of, f"SELECT ended_wall, ended_steady FROM jobs {latest}")
        return EndTime(wall=rows[0][0], steady=rows[0][1]) if rows else None

    async def live(self, job_ids: Sequence[str] | None = None) -> list[JobRecord]:
        """Read all live jobs, or those with these IDs."""
        which = [] if job_ids is None else [list(job_ids)]
        where = "ended_wall IS NULL" + " AND job_id = ANY(%s)" * len(which)
        return await self._list(f"jobs WHERE {where} ORDER BY sequence", *which)

    async def contents(self) -> dict[str, set[str]]:
        """Read the owners of all images."""
        owners: dict[str, set[str]] = {}
        for digest, tenant in await self._ask(rows_of, "SELECT digest, tenant FROM contents"):
            owners.setdefault(digest, set()).add(tenant)
        return owners

    async def page(
        self, wanted: JobFilter = ALL_JOBS, *, size: int, before_sequence: int | None = None
    ) -> list[JobRecord]:
        """Read a page of jobs, newest first."""
        limits: dict[str, Any] = {
            "tenant = %s": wanted.tenant,
            "created_wall >= %s": wanted.created_after,
            "created_wall < %s": wanted.created_before,
            "sequence < %s": before_sequence,
            "state = ANY(%s)": [int(state) for state in wanted.states] or None,
        }
        given = {condition: value for condition, value in limits.items() if value is not None}
        query = f"jobs WHERE {' AND '.join(given)} ORDER BY sequence DESC LIMIT %s"
        return await self._list(query, *given.values(), size)

    async def every(self, *, after: int, limit: int) -> list[JobRecord]:
        """Read the first jobs of all tenants with sequence numbers above `after`."""
        return await self._list("jobs WHERE sequence > %s ORDER BY sequence LIMIT %s", after, limit)

    async def removed(self) -> RemovedJobs:
        """Read the deletions and the counts of the days."""
        return await self._ask(sql.removed)

    async def remember(self, removed: RemovedJobs) -> None:
        """Remember deletions and counts of another store, unless they are known."""
        async with self._write() as connection:
            await sql.remember(connection, removed)

    async def newest_generation(self) -> int:
        """Read the number of the last start of a gateway."""
        ((number,),) = await self._ask(rows_of, "SELECT last_value FROM job_generation")
        return int(number)

    async def raise_generation(self, least: int) -> None:
        """Let the next start of a gateway have a number above `least`. No gateway may be starting."""
        async with self._write() as connection:
            query = "SELECT setval('job_generation', greatest(last_value, %s)) FROM job_generation"
            await rows_of(connection, query, (least,))

    async def forget(self, *, ended_before: float, max_jobs: int, max_bytes: int, limit: int) -> int:
        """Delete ended jobs, up to `limit`.

        Expired jobs are looked for each time. Whether all jobs are within the bounds is counted when so many were added
        that they may not be, or some time after the last count: it reads an index of all jobs.
        """
        await self._follow_clock()
        query = """
            SELECT EXISTS (SELECT FROM deletions WHERE steady < %(before)s)
                OR EXISTS (SELECT FROM jobs WHERE ended_steady < %(before)s),
                (SELECT coalesce(max(sequence), 0) FROM jobs)
        """
        async with self._read() as connection:
            ((expired, newest),) = await rows_of(connection, query, {"before": float(ended_before)})
            beyond, now, bounds = False, time.monotonic(), (max_jobs, max_bytes)
            if newest > self._room_until or now >= self._counts_from or bounds != self._counted_bounds:
                jobs, size_bytes = await totals(connection)
                beyond = jobs > max_jobs or size_bytes > max_bytes
                if not beyond:
                    room = max(max_jobs - jobs, int(max_jobs * _BEYOND_SHARE))
                    self._room_until, self._counts_from, self._counted_bounds = newest + room, now + _COUNTED_S, bounds
        if not (expired or beyond):
            return 0
        async with self._write() as connection:
            return await forget(connection, ended_before=ended_before, bounds=bounds if beyond else None, limit=limit)

    async def probe(self) -> None:
        """Check that the database can be written, by a write of a row that nothing else uses."""
        async with self._write() as connection:
            await connection.execute("UPDATE probes SET number = number + 1")

    @contextlib.asynccontextmanager
    async def _write(
        self, *, alone_for: str | None = None, lease: tuple[int, str] | None = None
    ) -> AsyncIterator[Connection]:
        """Begin a transaction, and check in it that the gateway may still write.

        Args:
            alone_for: Tenant whose quota lock the transaction takes.
            lease: Generation and address of another gateway, for which this one writes while it is the scheduler.
        """
        if not (self._readable if lease else self._writable):
            raise _not_open()
        fence = lease or self._fence
        began = time.perf_counter()
        async with self._database.transaction() as connection:
            turn, values = ("1", ()) if alone_for is None else lock_call(f"quotas of {alone_for}", waits_long=True)
            query = f"SELECT {turn}"
            if fence is not None:
                # The lock lets the holder extend its lease, but makes a take-over wait for this transaction.
                query += " FROM scheduler_lease WHERE (generation, address) = (%s, %s) FOR KEY SHARE"
            if fence is not None or alone_for is not None:
                with contextlib.nullcontext() if alone_for is None else busy_if_locked(_MANY):
                    rows = await rows_of(connection, query, (*values, *(fence or ())))
                if fence is not None and not rows:
                    raise StaleGeneration(fence[0])
            yield connection
        self._on_commit(time.perf_counter() - began)

    @contextlib.asynccontextmanager
    async def _read(self) -> AsyncIterator[Connection]:
        if not self._readable:
            raise _not_open()
        async with self._database.connection() as connection:
            yield connection

    async def _ask(self, read: Callable[..., Awaitable[ResultT]], *args: Any, **options: Any) -> ResultT:
        async with self._read() as connection:
            return await read(connection, *args, **options)

    async def _list(self, where: str, *parameters: Any) -> list[JobRecord]:
        """Return the jobs of a query, of which this is the part after FROM."""
        return await self._ask(sql.records_of, f"SELECT {sql.ALL} FROM {where}", *parameters)

    async def _follow_clock(self) -> None:
        began = time.monotonic()
        ((now,),) = await self._database.fetch("SELECT extract(epoch FROM clock_timestamp())::float8")
        self._clock.set(now, began=began)


def _not_open() -> StorageUnavailable:
    return os_errors.unavailable("the job store is not open", cause=os_errors.NOT_OPEN)
