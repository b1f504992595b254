"""Copies jobs from one job store to another, with their webhook events and images, while the gateways are down.

What callers deleted is deleted in the target as well, and the numbers of jobs of a day count there for quotas.

The source stays as it was: a SQLite file is copied first, and the copy is read. A copy can be repeated: what the target
has already is compared, and changed only if the job has not ended there. Times on the steady clock are converted from
the clock of one store to that of the other, in whole minutes, so that a repeated copy gives the same times.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bottega.clocks import Clock, ClockMark, SharedClock, SteadyClock
from bottega.errors import BottegaError, ConfigError, DataLoss, StorageUnavailable
from bottega.gateway.jobs.storage import APPLICATION
from bottega.gateway.jobs.store import EndTime, JobRecord, SqliteJobStore
from bottega.storage import BlobFiles, ContentStore, folders, os_errors
from bottega.storage.content_stores import content_store
from bottega.storage.shared_content import SharedContentStore

if TYPE_CHECKING:
    from bottega.gateway.jobs.store.postgresql import PostgresJobStore

_SQLITE, _POSTGRESQL = "sqlite:", ("postgresql://", "postgres://")
_APPLICATION = "bottega jobs migrate"
# Rounds the difference of two clocks.
_SHIFT_S = 60.0
_PAGE = 200
# Images are neither evicted nor forgotten by a copy.
_NO_BOUND = 1 << 60
# Images on their way stay on this machine's disk.
_LOCAL_BYTES = 256 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_STEADY = ("deadline_steady", "ended_steady")
_EVENT_STEADY = ("tried_since_steady", "due_steady")


@dataclass(slots=True, kw_only=True)
class MigrationCounts:
    """The counts of both sides after a copy."""

    jobs: int = 0
    """Number of jobs in the source."""
    same_jobs: int = 0
    """Number of jobs that the target has with the same values."""
    events: int = 0
    """Number of webhook events in the source."""
    same_events: int = 0
    """Number of events that the target has."""
    deletions: int = 0
    """Number of deletions that the source remembers."""
    same_deletions: int = 0
    """Number of those that the target remembers."""
    images: int = 0
    """Number of images, and of latents kept for edits, that the source has."""
    same_images: int = 0
    """Number of those that the target has."""
    evicted_images: int = 0
    """Number of images of jobs that the source does not have any more."""
    copies_images: bool = True
    """Whether images were copied: not if both sides use the same folder."""
    different: list[str] = dataclasses.field(default_factory=list)
    """IDs of jobs that differ, because the target has used them since, or has another job with the request_id."""

    @property
    def equal(self) -> bool:
        """Whether the target has all that the source has."""
        same = (self.same_jobs, self.same_events, self.same_deletions, self.same_images)
        return same == (self.jobs, self.events, self.deletions, self.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    store: SqliteJobStore | PostgresJobStore
    steady: float
    """Time of the store's steady clock now."""
    images: BlobFiles | ContentStore | None
    """The images beside a SQLite file."""


async def migrate(source: str, target: str, *, objects: str = "") -> MigrationCounts:
    """Copy all jobs, and return what both sides have afterwards.

    Args:
        source: sqlite:PATH, the file jobs.sqlite in a gateway's `state`; or postgresql://USER@HOST/NAME.
        target: Likewise.
        objects: s3://bucket/prefix where the side in PostgreSQL has its images; "" if its gateway uses the same folder
            `state` as the SQLite side, so that images stay where they are.

    Raises:
        ConfigError: If an address is wrong, or a gateway is running.
        StorageUnavailable: If one side cannot be read or written. The copy can be repeated.
    """
    if _is_postgresql(source) == _is_postgresql(target):
        raise ConfigError("one of --from and --to must be sqlite:PATH, and the other one postgresql://...")
    async with contextlib.AsyncExitStack() as stack:
        old = await stack.enter_async_context(_opened(source, writes=False))
        new = await stack.enter_async_context(_opened(target, writes=True))
        counts = MigrationCounts(copies_images=bool(objects))
        copy = _Migration(old, new, counts)
        await new.store.raise_generation(await old.store.newest_generation())
        await copy.jobs()
        await copy.events()
        await copy.removed()
        if objects:
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            bucket = await stack.enter_async_context(_objects(objects, Path(scratch)))
            if isinstance(old.images, BlobFiles):
                await copy.images(old.images, bucket)
            elif isinstance(new.images, ContentStore):
                await copy.images(bucket, new.images)
        return counts


class _Migration:
    """A copy of jobs, events and images from one side to the other."""

    def __init__(self, old: _Side, new: _Side, counts: MigrationCounts) -> None:
        self._old, self._new, self._counts = old.store, new.store, counts
        # To add to times on the steady clock.
        self._shift_s = round((new.steady - old.steady) / _SHIFT_S) * _SHIFT_S

    async def jobs(self) -> None:
        """Copy jobs and their inputs."""
        newest: dict[tuple[str, str], str] = {}  # by tenant and request_id
        async for record in _jobs(self._old):
            self._counts.jobs += 1
            request = (record.tenant, record.request_id)
            if await self._job(record, replaces=newest.get(request, "")):
                self._counts.same_jobs += 1
            else:
                self._counts.different.append(record.job_id)
            newest[request] = record.job_id

    async def _job(self, record: JobRecord, *, replaces: str) -> bool:
        """Copy a job. Return whether the target has it afterwards with the same values."""
        times = {name: getattr(record, name) for name in _STEADY}
        shifted = {name: time + self._shift_s for name, time in times.items() if time is not None}
        wanted = dataclasses.replace(record, sequence=0, **shifted)
        inputs = await self._old.inputs(record.job_id) if record.live else b""
        found = await self._new.add(wanted, inputs=inputs, replaces=replaces)
        if found.job_id == record.job_id and found.live and not _same(found, wanted):
            after = dataclasses.replace(wanted, sequence=found.sequence)
            await self._new.update(record.job_id, lambda _: after)
        stored = await self._new.get(record.job_id)
        return stored is not None and _same(stored, wanted)

    async def events(self) -> None:
        """Copy the webhook events."""
        after = 0
        while places := await self._old.outbox.places(after=after, limit=_PAGE):
            after = places[-1].number
            for place in places:
                event = await self._old.outbox.get(place.event_id)
                if event is not None:
                    self._counts.events += 1
                    times = {name: getattr(event, name) + self._shift_s for name in _EVENT_STEADY}
                    await self._new.outbox.put(dataclasses.replace(event, **times))
                    self._counts.same_events += await self._new.outbox.get(event.event_id) is not None

    async def removed(self) -> None:
        """Delete what the source has deleted since an earlier copy, and copy deletions and counts of days."""
        removed = await self._old.removed()
        shifted = [(*row[:3], row[3] + self._shift_s) for row in removed.deletions]
        for job_id, tenant, _, steady in shifted:
            found = await self._new.get(job_id, tenant=tenant)
            if found is None:
                continue
            if found.live:
                await self._new.update(job_id, functools.partial(_failed, steady=steady))
            await self._new.delete(job_id, tenant=tenant, steady=steady)
        await self._new.remember(dataclasses.replace(removed, deletions=shifted))
        self._counts.deletions = len(shifted)
        for job_id, tenant, *_ in shifted:
            self._counts.same_deletions += await self._new.was_deleted(job_id, tenant=tenant)

    async def images(self, old: BlobFiles | SharedContentStore, new: ContentStore | SharedContentStore) -> None:
        """Copy the images of all jobs, and the latents that are kept with them."""
        async for record in _jobs(self._old):
            for image in record.images:
                for digest, size_bytes in ((image.digest, image.size_bytes), (image.latents, image.latents_bytes)):
                    data = await _read(old, digest, size_bytes) if digest else None
                    if data is None:
                        self._counts.evicted_images += bool(digest)
                        continue
                    self._counts.images += 1
                    await new.put(digest, data, owner=record.tenant, job=record.job_id)
                    self._counts.same_images += new.holds(digest)


async def _read(images: BlobFiles | SharedContentStore, digest: str, size_bytes: int) -> bytes | None:
    """Return an image; None if it is not there, or damaged."""
    if isinstance(images, BlobFiles):
        return images.read(digest, digest=bytes.fromhex(digest), size_bytes=size_bytes)
    with contextlib.suppress(DataLoss):
        return await images.get(digest)
    return None


async def _jobs(store: SqliteJobStore | PostgresJobStore) -> AsyncIterator[JobRecord]:
    """Yield the jobs of all tenants in the order of their arrival."""
    after = 0
    while records := await store.every(after=after, limit=_PAGE):
        for record in records:
            yield record
        after = records[-1].sequence


def _failed(record: JobRecord, *, steady: float) -> JobRecord | None:
    return record.failed(error=b"", end=EndTime(wall=record.created_wall, steady=steady))


def _same(one: JobRecord, other: JobRecord) -> bool:
    return dataclasses.replace(one, sequence=0) == dataclasses.replace(other, sequence=0)


def _is_postgresql(address: str) -> bool:
    return address.startswith(_POSTGRESQL)


@contextlib.asynccontextmanager
async def _opened(address: str, *, writes: bool) -> AsyncIterator[_Side]:
    if _is_postgresql(address):
        async with _opened_database(address, writes=writes) as side:
            yield side
        return
    file = _file_of(address, exists=not writes)
    async with contextlib.AsyncExitStack() as stack:
        if writes:
            stack.callback(_give_to_owner, file.parent, _owner_of(file.parent))
            images: BlobFiles | ContentStore = await stack.enter_async_context(_images(file.parent / "images"))
            store = SqliteJobStore(file)
            stack.push_async_callback(store.close)
            await store.open()
        else:
            images = stack.enter_context(_left_images(file.parent / "images"))
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            store = SqliteJobStore(await asyncio.to_thread(_copied, file, Path(scratch)))
            stack.push_async_callback(store.close)
            await store.open_to_read()
        clock = SteadyClock(Clock())
        mark = ClockMark.read(file.parent / "clock.json")
        if mark is not None:
            clock.resume(mark)
        yield _Side(store=store, steady=clock(), images=images)


def _owner_of(folder: Path) -> os.stat_result:
    """Return whose a folder is, or will be: the gateway's user."""
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists()).stat()


def _give_to_owner(folder: Path, owner: os.stat_result) -> None:
    """Let the gateway's user write what root has copied."""
    if os.geteuid() == 0 and owner.st_uid != 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _file_of(address: str, *, exists: bool) -> Path:
    if not address.startswith(_SQLITE):
        raise ConfigError(
            f"{address.partition(':')[0]}: is not a job store: sqlite:PATH or postgresql://USER@HOST/NAME"
        )
    file = Path(address.removeprefix(_SQLITE)).expanduser()
    if exists and not file.is_file():
        raise ConfigError(f"there is no file {file}: give the path of jobs.sqlite in the gateway's `state`")
    return file


def _copied(file: Path, scratch: Path) -> Path:
    """Return a copy of a database and its log: even a reader may write to them."""
    for part in file.parent.glob(f"{file.name}*"):
        shutil.copy(part, scratch)
    return scratch / file.name


@contextlib.contextmanager
def _left_images(folder: Path) -> Iterator[BlobFiles]:
    """Yield the files of a gateway that does not run. Raise ConfigError if it does."""
    lock = folders.ProcessLock(folder)
    try:
        with os_errors.translated():
            folders.make_own(folder)
            lock.acquire()
    except StorageUnavailable as error:
        raise _in_use(error) from error
    try:
        yield BlobFiles(folder, names=_DIGEST)
    finally:
        lock.release()


@contextlib.asynccontextmanager
async def _images(folder: Path) -> AsyncIterator[ContentStore]:
    images = ContentStore(folder, budget_bytes=_NO_BOUND, ttl_s=float(_NO_BOUND))
    try:
        await images.open()
    except StorageUnavailable as error:
        await images.close()
        raise _in_use(error) from error
    try:
        yield images
    finally:
        await images.close()


def _in_use(error: StorageUnavailable) -> BottegaError:
    held = isinstance(error.__cause__, folders.HeldElsewhere)
    return ConfigError(f"stop the gateway first: {error.__cause__}") if held else error


@contextlib.asynccontextmanager
async def _opened_database(url: str, *, writes: bool) -> AsyncIterator[_Side]:
    from bottega.gateway.jobs.store.postgresql import PostgresJobStore
    from bottega.gateway.jobs.store.postgresql_schema import COMPONENT, MIGRATIONS
    from bottega.storage.postgresql import PostgresDatabase, refuse_password

    refuse_password(url)
    database, clock = PostgresDatabase(url, application=_APPLICATION), SharedClock()
    store = PostgresJobStore(database, clock=clock)
    try:
        await (store.open() if writes else store.open_to_read())
        if not writes and not await database.has_schema(COMPONENT, MIGRATIONS):
            raise ConfigError(f"the database {database.place} has no jobs")
        others = await database.fetch(
            "SELECT DISTINCT application_name FROM pg_stat_activity WHERE datname = current_database() "
            "AND starts_with(application_name, %s) ORDER BY 1",
            (APPLICATION,),
        )
        if others:
            names = ", ".join(name.removeprefix(APPLICATION) for (name,) in others)
            raise ConfigError(f"stop the gateways first: {names} uses the database {database.place}")
        yield _Side(store=store, steady=clock(), images=None)
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def _objects(objects: str, scratch: Path) -> AsyncIterator[SharedContentStore]:
    images = content_store(
        scratch / "images",
        objects,
        "",
        local_bytes=_LOCAL_BYTES,
        budget_bytes=_NO_BOUND,
        ttl_s=float(_NO_BOUND),
        clock=Clock(),
    )
    assert isinstance(images, SharedContentStore)
    await images.open()
    try:
        yield images
    finally:
        await images.close()
