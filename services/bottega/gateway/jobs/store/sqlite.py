"""The job store of a gateway in one SQLite file.

One thread writes groups of operations. Another thread reads on its own connection, so that reads never wait for writes.
A file that is deleted or replaced while it is open is restored from the open one. After a file was truncated, a new one
is created with the jobs that have not ended.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from bottega.errors import BottegaError, DataLoss, StorageUnavailable
from bottega.gateway.jobs.store import sqlite_schema, sqlite_statements
from bottega.gateway.jobs.store.job_store import (
    ALL_JOBS,
    Change,
    EndTime,
    EventOf,
    JobFilter,
    JobRecord,
    RemovedJobs,
    no_event,
)
from bottega.gateway.jobs.store.quotas import TenantUsage
from bottega.gateway.jobs.store.sqlite_outbox import SqliteOutbox
from bottega.gateway.jobs.store.sqlite_statements import Listing
from bottega.gateway.jobs.store.sqlite_writer import FileLoss, FilePlace, GroupCommit
from bottega.rpc.security.tenant_file import UNBOUNDED, Quotas
from bottega.storage import SerialThread, os_errors, sqlite_files

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


def _ignore(_: float) -> None:
    """Ignore the time of a commit."""


class SqliteJobStore:
    """A JobStore in a SQLite file. Only one process at a time may open the file; it may have several store objects.

    Args:
        path: The file.
        on_commit: Called in a thread of the store with the duration of each commit in seconds.

    Attributes:
        outbox: The webhook events of its jobs.
    """

    def __init__(self, path: Path, *, on_commit: Callable[[float], None] = _ignore) -> None:
        self._path = path
        self._place = FilePlace(path)
        self._writer = GroupCommit(self._connect, self._typed, on_commit, self._check_place)
        self._reader = SerialThread("job-reader")
        self._reading: sqlite3.Connection | None = None
        self._readable = self._writable = False
        self._sound = True
        self._sound_state: sqlite_schema.FileState | None = None
        self._damaged: set[int] = set()  # sequence numbers of jobs that the log has named
        self._generation = 0
        self._lost = self._begun_anew = False
        self._reading_lock = threading.Lock()  # guards the reading connection, which the writer may have to close
        self._newest = 0  # sequence
        self.outbox = SqliteOutbox(write=self._write, read=self._query)

    @property
    def lost(self) -> bool:
        """Whether the file was truncated. Nothing is read or written until `remake` succeeds."""
        return self._lost

    @property
    def generation(self) -> int:
        """Number of this start of the gateway; 0 before `open`."""
        return self._generation

    @property
    def waiting(self) -> int:
        """Number of operations that wait to be written."""
        return self._writer.waiting

    async def open(self) -> None:
        """Check the file, create its tables if needed, and count this start of the gateway."""
        if self._writable:
            return
        await self._reader.run(self._inspect)
        with os_errors.translated():
            self._place.remember()
        self._generation = await self._writer.run(lambda connection: sqlite_schema.adopt(connection, self._path))
        self._newest = await self._writer.run(sqlite_schema.newest_sequence)
        self._readable = self._writable = True

    async def open_to_read(self) -> None:
        """Check the file, if there is one, and read it."""
        if not self._writable:
            await self._reader.run(self._inspect_if_there)

    async def close(self) -> None:
        """Stop both threads and close the file."""
        self._writable = False
        await self._reader.close()
        await self._writer.close()
        await asyncio.to_thread(self._stop_reading)

    async def remake(self, live: AsyncIterator[tuple[JobRecord, bytes]]) -> None:
        """Create the file again from its readable rows and from the jobs that have not ended."""
        if not self._lost:
            return
        if not self._begun_anew:
            await self._reader.run(self._begin_anew)
            self._begun_anew = True
        generation, newest = self._generation, self._newest
        await self._writer.run(
            lambda connection: sqlite_schema.readopt(connection, self._path, generation=generation, newest=newest)
        )
        async for record, inputs in live:
            await self._put_back(record, inputs)
        self._lost = self._begun_anew = False

    async def _put_back(self, record: JobRecord, inputs: bytes) -> None:
        await self._writer.run(
            lambda connection: sqlite_statements.put_back(connection, record, inputs),
            size_bytes=len(record.spec) + len(inputs),
        )

    async def add(
        self,
        record: JobRecord,
        *,
        inputs: bytes = b"",
        replaces: str = "",
        event_of: EventOf = no_event,
        quotas: Quotas = UNBOUNDED,
    ) -> JobRecord:
        """Insert a job."""
        added = await self._write(
            lambda connection: sqlite_statements.add(
                connection, record, inputs, replaces=replaces, event_of=event_of, quotas=quotas
            ),
            size_bytes=len(record.spec) + len(inputs),
        )
        self._newest = max(self._newest, added.sequence)
        return added

    async def update(self, job_id: str, change: Change, *, event_of: EventOf = no_event) -> bool:
        """Apply a change in the next group commit."""
        return await self._write(
            lambda connection: sqlite_statements.update(connection, job_id, change, event_of=event_of)
        )

    async def delete(self, job_id: str, *, tenant: str = "", steady: float) -> list[str] | None:
        """Delete an ended job and return its digests; if it was deleted before, return the same digests again."""
        return await self._write(
            lambda connection: sqlite_statements.delete(connection, job_id, tenant=tenant, steady=steady)
        )

    async def was_deleted(self, job_id: str, *, tenant: str = "") -> bool:
        """Return whether a job was deleted."""
        found = await self._find(lambda connection: sqlite_statements.deleted_contents(connection, job_id, tenant))
        return found is not None

    async def get(self, job_id: str, *, tenant: str | None = None) -> JobRecord | None:
        """Read the job with this ID."""
        return await self._find(lambda connection: sqlite_statements.of_job(connection, job_id, tenant=tenant))

    async def of_request(self, request_id: str, *, tenant: str = "") -> JobRecord | None:
        """Read the newest job with a tenant's request_id."""
        return await self._find(lambda connection: sqlite_statements.of_request(connection, request_id, tenant=tenant))

    async def usage(self, tenant: str, *, now_wall: float) -> TenantUsage:
        """Read the number of jobs and bytes of a tenant."""
        found = await self._find(lambda connection: sqlite_statements.usage_of(connection, tenant, now_wall=now_wall))
        return found or TenantUsage()

    async def with_result(self, result_key: str, *, limit: int) -> list[JobRecord]:
        """Read the newest jobs with a result key."""
        return await self._list(lambda connection: sqlite_statements.with_result(connection, result_key, limit=limit))

    async def with_kept_picture(self, digest: str, *, tenant: str = "", limit: int) -> list[JobRecord]:
        """Read the newest jobs that keep latents of an image."""
        return await self._list(
            lambda connection: sqlite_statements.with_kept_picture(connection, digest, tenant=tenant, limit=limit)
        )

    async def inputs(self, job_id: str) -> bytes:
        """Read the inputs of a live job."""
        return await self._find(lambda connection: sqlite_statements.inputs_of(connection, job_id)) or b""

    async def last_end(self) -> EndTime | None:
        """Read the latest end of a job."""
        return await self._find(sqlite_statements.last_end)

    async def live(self, job_ids: Sequence[str] | None = None) -> list[JobRecord]:
        """Read all live jobs, or those with these IDs."""
        records = await self._list(sqlite_statements.live)
        return [record for record in records if job_ids is None or record.job_id in job_ids]

    async def contents(self) -> dict[str, set[str]]:
        """Read the owners of all images."""
        return await self._find(sqlite_statements.contents) or {}

    async def page(
        self, wanted: JobFilter = ALL_JOBS, *, size: int, before_sequence: int | None = None
    ) -> list[JobRecord]:
        """Read a page of jobs, newest first."""
        return await self._list(
            lambda connection: sqlite_statements.page(connection, wanted, size=size, before_sequence=before_sequence)
        )

    async def every(self, *, after: int, limit: int) -> list[JobRecord]:
        """Read the first jobs of all tenants with sequence numbers above `after`."""
        return await self._list(lambda connection: sqlite_statements.every(connection, after=after, limit=limit))

    async def removed(self) -> RemovedJobs:
        """Read the deletions and the counts of the days."""
        return await self._query(sqlite_statements.removed)

    async def remember(self, removed: RemovedJobs) -> None:
        """Remember deletions and counts of another store, unless they are known."""
        await self._write(lambda connection: sqlite_statements.remember(connection, removed))

    async def newest_generation(self) -> int:
        """Read the newest generation."""
        return await self._query(sqlite_schema.newest_generation)

    async def raise_generation(self, least: int) -> None:
        """Let the next start of the gateway have a generation above `least`."""
        await self._write(lambda connection: sqlite_schema.raise_generation(connection, least))

    async def forget(self, *, ended_before: float, max_jobs: int, max_bytes: int, limit: int) -> int:
        """Delete ended jobs, up to `limit`."""
        return await self._write(
            lambda connection: sqlite_statements.forget(
                connection, ended_before=ended_before, max_jobs=max_jobs, max_bytes=max_bytes, limit=limit
            )
        )

    async def probe(self) -> None:
        """Check that the disk can be written, by writing a page with unchanged contents."""
        await self._write(sqlite_statements.probe)

    async def _write(self, operation: Callable[[sqlite3.Connection], ResultT], *, size_bytes: int = 0) -> ResultT:
        if not self._sound:
            raise sqlite_schema.damaged()
        if not self._writable:
            raise os_errors.unavailable("the job store is not open", cause=os_errors.NOT_OPEN)
        if self._lost:
            raise _out_of_place()
        return await self._writer.run(operation, size_bytes=size_bytes)

    async def _find(self, query: Callable[[sqlite3.Connection], ResultT | None]) -> ResultT | None:
        found = await self._reader.run(lambda: self._read(query))
        if found is None and not self._sound:
            raise sqlite_schema.damaged()  # the missing job may have been lost by the damage
        return found

    async def _list(self, query: Callable[[sqlite3.Connection], Listing]) -> list[JobRecord]:
        found = await self._reader.run(lambda: self._read(query))
        if not self._sound:
            raise sqlite_schema.damaged()  # some may be missing
        for sequence in set(found.damaged) - self._damaged:
            self._damaged.add(sequence)
            _log.error(
                "a job is damaged and cannot be read; its row is left unchanged",
                extra={"file": str(self._path), "sequence": sequence},
            )
        return found.records

    async def _query(self, query: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        return await self._reader.run(lambda: self._read(query))

    def _read(self, query: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        if not self._readable:
            raise os_errors.unavailable("the job store is not open", cause=os_errors.NOT_OPEN)
        with self._reading_lock:
            if self._lost:
                raise _out_of_place()
            try:
                if self._reading is None:
                    self._reading = sqlite_schema.connect_to_read(self._path)
                return query(self._reading)
            except sqlite3.Error as error:
                self._stop_reading()
                raise (self._typed(error) or error) from error

    def _check_place(self, connection: sqlite3.Connection, committed: bool) -> None:
        """If the file was moved or deleted, restore it and raise StorageUnavailable: the commit would not last."""
        loss = self._place.loss(committed=committed, header=committed)
        if loss is None:
            return
        if not self._lost:
            facts = {"file": str(self._path), "why": loss.value}
            _log.error(
                "the job store's file was moved or deleted; no job is accepted until it is restored", extra=facts
            )
        with self._reading_lock, os_errors.translated():
            self._stop_reading()
            if loss is FileLoss.MOVED and self._place.put_back(connection):
                _log.warning("the job store's file was restored with all jobs", extra={"file": str(self._path)})
            else:
                self._lost, self._begun_anew = True, False
        raise _out_of_place()

    def _begin_anew(self) -> None:
        self._stop_reading()
        with os_errors.translated():
            self._place.begin_anew()
        facts = {"file": str(self._path)}
        _log.error("the job store is created again; ended jobs may be missing, all others are kept", extra=facts)

    def _inspect_if_there(self) -> None:
        with os_errors.translated():
            is_there = self._path.exists()
        if is_there:
            self._inspect()

    def _inspect(self) -> None:
        """Check, before the first write, that the file is an undamaged job store of this version."""
        with os_errors.translated():
            sqlite_files.create_file(self._path)
        self._stop_reading()  # the file may be another one since the last look
        made = True
        try:
            self._reading = sqlite_schema.connect_to_read(self._path)
            made = self._readable = sqlite_schema.has_tables(self._reading, self._path)
            self._sound = self._is_sound(self._reading, made=made)
        except sqlite3.Error as error:
            typed = self._typed(error)
            if not isinstance(typed, DataLoss):
                self._stop_reading()
                if (
                    error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY
                ):  # a busy file may be written by another process
                    self._read_as_left()
                raise (typed or error) from error
        if not self._sound:
            self._readable = made
            raise DataLoss(
                f"{self._path} is damaged. Restore it from a backup, or move it and the files beside it that begin "
                "with its name away: the jobs in it are lost then, and a new one is made"
            )

    def _read_as_left(self) -> None:
        """Open the existing file read-only until the next check, because it cannot be written now."""
        try:
            self._reading = sqlite_files.connect_as_left(self._path)
            made = sqlite_schema.has_tables(self._reading, self._path)
            self._readable = made and self._is_sound(self._reading, made=made)
        except (sqlite3.Error, OSError, StorageUnavailable):
            self._stop_reading()  # the caller knows already why it cannot be opened

    def _is_sound(self, connection: sqlite3.Connection, *, made: bool) -> bool:
        """Return whether the file is undamaged. It is only checked after a change: a start retries twice a second."""
        with os_errors.translated():
            state = sqlite_schema.state_of(self._path)
        if state != self._sound_state:
            self._sound_state = state if sqlite_schema.is_sound(connection, made=made) else None
        return self._sound_state is not None

    def _connect(self) -> sqlite3.Connection:
        if self._place.loss() is not None:  # it was lost while it was closed, so it cannot be restored
            self._lost, self._begun_anew = True, False
            raise _out_of_place()
        self._place.forget_log()
        return sqlite_schema.connect_to_write(self._path)

    def _typed(self, error: sqlite3.Error) -> BottegaError | None:
        typed = sqlite_schema.typed_error(error)
        if isinstance(typed, DataLoss) and (self._lost or self._place.loss() is not None):
            return _out_of_place()  # the next write puts it back
        if isinstance(typed, DataLoss) and self._sound:
            self._sound = False
            _log.error("the job store is damaged; from now on it is only read", extra={"file": str(self._path)})
        return typed

    def _stop_reading(self) -> None:
        connection, self._reading = self._reading, None
        if connection is not None:
            connection.close()


def _out_of_place() -> StorageUnavailable:
    return os_errors.unavailable("the job store's file was moved or deleted and is being restored", cause="ESTALE")
