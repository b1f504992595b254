"""The gateway's disk: the job store, the finished images, and whether they can be written now.

Opening both stores is retried until it succeeds. A failing disk is tested until it works again. Old jobs, and jobs
beyond the budget, are deleted in small batches. Writes that must not be lost are retried until they succeed. While the
disk cannot be written, no job is accepted or dispatched, and finished images wait in memory, up to a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bottega.background_tasks import BackgroundTasks, copied
from bottega.clocks import ClockMark, SharedClock, seconds_until_tick
from bottega.errors import BottegaError, ConfigError, DataLoss, StorageUnavailable, TooManyOpenFiles
from bottega.gateway.jobs.store import JobRecord, JobStore, SqliteJobStore, StaleGeneration
from bottega.gateway.jobs.values import StoredImage
from bottega.storage import ContentStore, SharedContentStore, os_errors
from bottega.storage.objects import OPERATOR_CAUSES

if TYPE_CHECKING:
    from bottega.gateway.jobs.store.postgresql import PostgresJobStore

ResultT = TypeVar("ResultT")

# Seconds between two tries: short enough for callers that wait, long enough for a full disk.
_RETRY_S = 0.5
# Seconds between two tries of a damaged store, which only a person repairs. A check takes a second of one core.
_DAMAGED_RETRY_S = 5.0
_SWEEP_S = 1.0
# The same for images: each that is stored makes room for itself, and an expired one may stay for some seconds.
_IMAGES_SWEEP_S = 5.0
# File of the steady clock, and how often it is written: after a restart of the machine the clock goes on from there.
_CLOCK, _CLOCK_S = "clock.json", 60.0
# Number of jobs that are deleted in one transaction, which takes some milliseconds.
_SWEEP_JOBS = 100
# Errors of a folder for which waiting does not help: it is no folder, or this user may not use it.
_UNUSABLE = frozenset({"EACCES", "EEXIST", "ELOOP", "ENAMETOOLONG", "ENOTDIR", "EPERM"})

APPLICATION = "bottega gateway "
"""Beginning of the names that PostgreSQL shows for the connections of gateways; the name of the gateway follows."""

LiveJobs = Callable[[], AsyncIterator[tuple[JobRecord, bytes]]]
"""Yields the records of live jobs, each with its serialized inputs (b"" without input images)."""

_log = logging.getLogger(__name__)


async def digest(data: bytes) -> str:
    """Return the SHA-256 in hex, computed in a thread if it would block the event loop for long."""
    return await copied(len(data), lambda: hashlib.sha256(data).hexdigest())


def create_job_store(
    folder: Path, url: str, *, name: str, clock: SharedClock | None, on_commit: Callable[[float], None]
) -> SqliteJobStore | PostgresJobStore:
    """Return the job store of a gateway, not open yet. Raises ConfigError if the client of PostgreSQL is missing.

    Args:
        folder: Folder of the SQLite file.
        url: URL of the PostgreSQL database that several gateways share; "" for the SQLite file.
        name: Name of the gateway, which PostgreSQL shows with its connections.
        clock: Follows the clock of the database; None without one.
        on_commit: Called with the duration of each commit in seconds.
    """
    if clock is None:
        return SqliteJobStore(folder / "jobs.sqlite", on_commit=on_commit)
    from bottega.gateway.jobs.store.postgresql import PostgresJobStore
    from bottega.storage.postgresql import PostgresDatabase

    database = PostgresDatabase(url, application=f"{APPLICATION}{name}")
    return PostgresJobStore(database, clock=clock, on_commit=on_commit)


class NotScheduler(Exception):
    """A call that needs the list of stored images, while another gateway is the scheduler and keeps it."""


class Storage:
    """The disk of a gateway. Call `open` first, then `start`; close it last.

    Args:
        folder: Folder of both stores.
        jobs: The job store.
        images: The store of images.
        max_jobs: Upper bound on the number of ended jobs that are kept.
        jobs_bytes: Upper bound on the total bytes of their records.
        jobs_ttl_s: Seconds for which an ended job is kept.
        waiting_bytes: Upper bound on the total bytes of images that wait in memory for a failing disk.
        steady: Clock that all gateways of a job store share; None if the store has one gateway.

    Attributes:
        follows: Whether another gateway is the scheduler, so that no list of images is kept here.
        trouble: The error for callers while nothing can be written; None while the disk works.
        changed: Set whenever `trouble` begins or ends; its only reader clears it.
        steady: Clock by which jobs expire. It ignores changes of the machine's clock, and goes on after a restart.
    """

    def __init__(
        self,
        *,
        folder: Path,
        jobs: JobStore,
        images: ContentStore | SharedContentStore,
        max_jobs: int,
        jobs_bytes: int,
        jobs_ttl_s: float,
        waiting_bytes: int,
        steady: SharedClock | None = None,
    ) -> None:
        self.folder = folder
        self.jobs = jobs
        self.images = images
        self.follows = False
        self.trouble: BottegaError | None = None
        self.changed = asyncio.Event()
        self._max_jobs = max_jobs
        self._jobs_bytes = jobs_bytes
        self._jobs_ttl_s = jobs_ttl_s
        # Everything that is being stored at once fits into the budget, so no job evicts the images of another.
        self._room_bytes = min(waiting_bytes, images.budget_bytes)
        self.steady: Callable[[], float] = steady or images.steady
        self._shared = steady
        self._steady_continued = False
        self._clock_noted_at = -math.inf
        self._unwritten = 0
        self._images_failed_at: float | None = None
        self._tasks = BackgroundTasks("upkeep of the disk")

    async def open(
        self,
        *,
        restore: Callable[[], Awaitable[None]] | None = None,
        on_failure: Callable[[], None] | None = None,
        within_s: float = math.inf,
    ) -> None:
        """Open both stores. Retry until both are open and `restore` has succeeded.

        Args:
            restore: Reads the data that the gateway needs before it serves calls.
            on_failure: Called when a store cannot be opened at once; reads may work even then.
            within_s: Seconds after which the next failure ends the tries.

        Raises:
            ConfigError: If files belong to another program, or a folder is unusable until a person changes something.
            StorageUnavailable: After `within_s`.
            DataLoss: The same, if a store is damaged.
        """
        ends = time.monotonic() + within_s
        while True:
            try:
                await self._open()
                if restore is not None:
                    await restore()
            except (StorageUnavailable, DataLoss) as error:
                self._check_folder(error)
                self.report_failure(error)
                if on_failure is not None:
                    on_failure()
                if time.monotonic() > ends:
                    raise
                await asyncio.sleep(_DAMAGED_RETRY_S if isinstance(error, DataLoss) else _RETRY_S)
            else:
                self._recovered()
                return

    def start(self, live: LiveJobs) -> None:
        """Start the upkeep task: it deletes old jobs and jobs beyond the budget, and tests a failing disk.

        The live jobs are for a job store whose file was deleted.
        """
        self._tasks.start(self._keep_up(live))

    async def close(self) -> None:
        """Finish the operations that have begun, and close both stores."""
        await self._tasks.cancel()
        for store in (self.jobs, self.images):
            try:
                await store.close()
            except StorageUnavailable as error:
                _log.warning("a store did not close in time", extra={"text": error.message})

    @property
    def images_failed_s(self) -> float:
        """Seconds for which every try to store an image has failed; 0 if the last one succeeded."""
        return 0.0 if self._images_failed_at is None else time.monotonic() - self._images_failed_at

    def check_writable(self) -> None:
        """Raise the error of the disk if it cannot be written now."""
        if self.trouble is not None:
            raise self.trouble.with_traceback(None)

    def report_failure(self, error: BottegaError) -> None:
        """Note that a write failed. From now on no job is accepted until the disk works again."""
        if error.metadata.get("cause") == os_errors.BUSY:
            return  # too many writes at once: the disk itself works
        if isinstance(error, StaleGeneration):
            if not isinstance(self.trouble, StaleGeneration):
                _log.warning("another gateway is the scheduler now; this one writes no jobs", extra=error.metadata)
        elif self.trouble is None:
            facts = {"text": error.message, **error.metadata}
            if self._shared is None or isinstance(error.__cause__, OSError):
                facts["folder"] = str(self.folder)
            full = isinstance(error, TooManyOpenFiles)
            what = "too many files and sockets are open" if full else "jobs and images cannot be stored"
            if isinstance(error.__cause__, StorageUnavailable):  # its text is for the log alone
                what, facts = "the object storage cannot be used", {**facts, "text": error.__cause__.message}
            _log.error("%s; no job is accepted until this ends", what, extra=facts)
        if isinstance(error, DataLoss):  # details of damage are for the log alone
            error = DataLoss("the gateway's store is damaged; its operator has to repair it")
        before, self.trouble = self.trouble, error
        if before is None:
            self.changed.set()

    async def retry_until_written(self, write: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Call `write` until the disk works, and return its result. Raises errors that are not caused by the disk."""
        waits = False
        try:
            while True:
                try:
                    return await write()
                except StorageUnavailable as error:
                    self._unwritten += not waits
                    waits = True
                    self.report_failure(error)
                    await asyncio.sleep(_RETRY_S)
                except DataLoss as error:
                    self.report_failure(error)
                    raise
        finally:
            self._unwritten -= waits

    async def store_images(
        self, encoded: Sequence[bytes], latents: Sequence[bytes] = (), *, tenant: str = "", job_id: str = ""
    ) -> tuple[StoredImage, ...]:
        """Store finished images, and wait until they are on the disk, however long that takes.

        Args:
            encoded: The images.
            latents: For each image the latents to keep for edits, or b""; may be an empty sequence.
            tenant: The tenant that owns the images.
            job_id: The job whose images they are.

        Raises:
            StorageUnavailable: If too many bytes already wait for the disk.
            TooLarge: If an image is larger than the whole budget.
        """
        latents = latents or [b""] * len(encoded)
        size_bytes = sum(map(len, (*encoded, *latents)))
        if size_bytes > self._room_bytes:
            raise os_errors.unavailable("too many images wait in memory for the disk", cause=os_errors.BUSY)
        self._room_bytes -= size_bytes
        try:
            images: list[StoredImage] = []
            contents: dict[str, bytes] = {}
            for data, latent in zip(encoded, latents, strict=True):
                name, kept = await digest(data), await digest(latent) if latent else ""
                images.append(StoredImage(digest=name, size_bytes=len(data), latents=kept, latents_bytes=len(latent)))
                contents |= {name: data, kept: latent}
            contents.pop("", None)
            with self.images.pinned(list(contents)):
                for name, data in contents.items():
                    put = functools.partial(self.images.put, name, data, owner=tenant, job=job_id)
                    await self.retry_until_written(put)
            return tuple(images)
        finally:
            self._room_bytes += size_bytes

    async def read_kept(self, name: str) -> bytes:
        """Return the latents that were kept for edits, by their digest; b"" if they are deleted or cannot be read."""
        try:
            return await self.images.get(name) or b""
        except (StorageUnavailable, DataLoss) as error:
            _log.warning("stored latents of an image cannot be read", extra={"digest": name, "text": error.message})
            return b""

    async def renew_images(self, images: Sequence[StoredImage], *, tenant: str = "", job_id: str = "") -> bool:
        """Restart the lifetime of a tenant's images and kept latents. Return False if one is missing or damaged.

        `job_id` is the new job that will have them; "" while nothing is decided. Raises NotScheduler if there are
        images and another gateway is the scheduler.
        """
        contents = [digest for image in images for digest in image.contents]
        if contents and self.follows:
            raise NotScheduler
        if not all(map(self.images.holds, contents)):
            return False
        return all([await self.images.renew(digest, owner=tenant, job=job_id) for digest in contents])

    async def renew_kept(self, name: str) -> bool:
        """Restart the lifetime of kept latents; as `renew_images`."""
        if self.follows:
            raise NotScheduler
        return await self.images.renew(name)

    def pinned(self, images: Sequence[StoredImage]) -> contextlib.AbstractContextManager[None]:
        """Protect images and their kept latents from deletion in the block, even if another job is deleted."""
        return self.images.pinned([digest for image in images for digest in image.contents])

    async def _open(self) -> None:
        """Open the image store, then the job store. Only the owner of the first may change the second."""
        mark = None if self._steady_continued else ClockMark.read(self.folder / _CLOCK)
        if mark is not None:
            self.images.steady.resume(mark)
            self._steady_continued = True
        try:
            await self.images.open()
        except (StorageUnavailable, DataLoss):
            with contextlib.suppress(StorageUnavailable, DataLoss):  # reads of the jobs and the next try raise it
                await self.jobs.open_to_read()
            raise
        await self.jobs.open()
        await self.images.assign(await self.jobs.contents())
        if not self._steady_continued:
            if self.steady is self.images.steady and (last := await self.jobs.last_end()) is not None:
                self.images.steady.go_on_from(last.steady)
            self._steady_continued = True
        self._note_clock()

    def _check_folder(self, error: BottegaError) -> None:
        """Raise ConfigError if only a person can repair the failure, so that retrying does not help."""
        cause = error.metadata.get("cause", "")
        if cause in OPERATOR_CAUSES and isinstance(error.__cause__, StorageUnavailable):
            raise ConfigError(f"objects: {error.__cause__.message}") from error
        if cause in _UNUSABLE:
            why = os.strerror(getattr(errno, cause)).lower()
            raise ConfigError(
                f"state: the folder {self.folder} cannot be used: {why}; change its permissions or configure another"
            ) from error

    async def _keep_up(self, live: LiveJobs) -> None:
        images_due_at = -math.inf
        while True:
            await asyncio.sleep(seconds_until_tick(_SWEEP_S) if self.trouble is None else _RETRY_S)
            try:
                if self.trouble is None:
                    self._note_clock()
                    if time.monotonic() >= images_due_at:
                        images_due_at = time.monotonic() + seconds_until_tick(_IMAGES_SWEEP_S)
                        await self._sweep_images()
                    await self._forget_jobs()
                else:
                    await self._probe(live)
            except (StorageUnavailable, DataLoss) as error:
                self.report_failure(error)
            except Exception:  # noqa: BLE001 - the boundary of the task: without it nothing is ever swept or healed
                _log.exception("the upkeep of the disk failed; it is tried again")

    async def _probe(self, live: LiveJobs) -> None:
        try:
            await self.images.probe()
        except (StorageUnavailable, DataLoss):
            self._images_failed_at = self._images_failed_at or time.monotonic()
            raise
        self._images_failed_at = None
        if self.jobs.lost:
            await self.jobs.remake(live())
        await self.jobs.probe()
        if not self._unwritten:  # waiting writes retry by themselves and test more, because they are larger
            self._recovered()

    def _note_clock(self) -> None:
        now = self.images.steady()
        if now - self._clock_noted_at >= _CLOCK_S:
            self._clock_noted_at = now
            self.images.steady.mark().write(self.folder / _CLOCK)

    async def _sweep_images(self) -> None:
        while self.trouble is None and await self.images.sweep():
            pass

    async def _forget_jobs(self) -> None:
        # What the shared clock skipped is not part of a job's age, until all jobs from before have expired anyway.
        skipped_s = self._shared.jumped_s(self._jobs_ttl_s) if self._shared is not None else 0.0
        ended_before = self.steady() - skipped_s - self._jobs_ttl_s
        forgotten = _SWEEP_JOBS
        while forgotten == _SWEEP_JOBS:
            forgotten = await self.jobs.forget(
                ended_before=ended_before, max_jobs=self._max_jobs, max_bytes=self._jobs_bytes, limit=_SWEEP_JOBS
            )

    def _recovered(self) -> None:
        before, self.trouble = self.trouble, None
        if before is None:
            return
        self.changed.set()
        if not isinstance(before, StaleGeneration):
            full = isinstance(before, TooManyOpenFiles)
            _log.info("files and sockets can be opened again" if full else "jobs and images can be stored again")
