"""The gateway's disk: the job store and the finished images, and whether they can be written now.

Opens both, again and again until it can; notices when a disk that was full or gone is back; deletes in small slices
what is too old or too much. What must be written is tried until it is. While the disk cannot be written, no job is
accepted or dispatched, and finished images wait in memory, up to a bound.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, ConfigError, DataLoss, StorageUnavailable, TooManyOpenFiles
from bottega.gateway.jobs.store import JobRecord, JobStore
from bottega.gateway.jobs.values import StoredImage
from bottega.process import copied
from bottega.storage import ContentStore, clock_file, os_errors

ResultT = TypeVar("ResultT")

# Between two tries: soon enough for callers that wait, seldom enough for a disk that is busy with being full.
_RETRY_S = 0.5
# The same for a damaged store, which only a person repairs, and whose check takes a second of a core.
_DAMAGED_RETRY_S = 5.0
_SWEEP_S = 1.0
# Where the steady clock is noted, and how often: after a restart of the machine it goes on from there.
_CLOCK, _CLOCK_S = "clock.json", 60.0
# Jobs that are forgotten in one transaction: some milliseconds.
_SWEEP_JOBS = 100
# Why a folder cannot be used, where no waiting helps: something else has its name, or it is not for this user.
_UNUSABLE = frozenset({"EACCES", "EEXIST", "ELOOP", "ENAMETOOLONG", "ENOTDIR", "EPERM"})

LiveJobs = Callable[[], AsyncIterator[tuple[JobRecord, bytes]]]
"""Gives jobs that have not ended, each with what it needs beside its record."""

_log = logging.getLogger(__name__)


async def digest(data: bytes) -> str:
    """SHA-256 in hex, computed in a thread where it would block the event loop for long."""
    return await copied(len(data), lambda: hashlib.sha256(data).hexdigest())


class Storage:
    """Call `open` first, then `start`; close it last.

    folder: of both, for the log. trouble: why nothing can be written now, as callers may read it; None while all is
    well. changed: set whenever trouble begins or ends; its only reader clears it.
    max_jobs, jobs_bytes, jobs_ttl_s: bounds on the jobs that are remembered. steady: the time by which
    they and images are forgotten, whatever the machine's clock is set to; it continues that of an earlier life.
    waiting_bytes: of images that may wait in memory for a disk that cannot take them.
    """

    def __init__(
        self,
        *,
        folder: Path,
        jobs: JobStore,
        images: ContentStore,
        max_jobs: int,
        jobs_bytes: int,
        jobs_ttl_s: float,
        waiting_bytes: int,
    ) -> None:
        self.folder = folder
        self.jobs = jobs
        self.images = images
        self.trouble: BottegaError | None = None
        self.changed = asyncio.Event()
        self._max_jobs = max_jobs
        self._jobs_bytes = jobs_bytes
        self._jobs_ttl_s = jobs_ttl_s
        # All that is being stored at once fits into the budget, so that no job's first image goes for another's last.
        self._room_bytes = min(waiting_bytes, images.budget_bytes)
        self.steady = images.steady
        self._steady_continued = False
        self._clock_noted_at = -math.inf
        self._unwritten = 0
        self._live: LiveJobs = _no_jobs
        self._tasks = BackgroundTasks("upkeep of the disk")

    async def open(
        self,
        *,
        restore: Callable[[], Awaitable[None]] | None = None,
        on_failure: Callable[[], None] | None = None,
        live: LiveJobs | None = None,
    ) -> None:
        """Return when both stores are open and `restore` has succeeded.

        Args:
            restore: Reads what is read before anything else.
            on_failure: Called when a store cannot be opened at once; reads may work even then.
            live: Gives the jobs that have not ended, with their inputs, for a job store whose file was lost meanwhile.

        Raises:
            ConfigError: Files are not ours, or a folder cannot be used and will not be by itself.
        """
        self._live = live or _no_jobs
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
                await asyncio.sleep(_DAMAGED_RETRY_S if isinstance(error, DataLoss) else _RETRY_S)
            else:
                self._recovered()
                return

    def start(self) -> None:
        """Starts to forget what is too old or too much, and to probe a disk that fails."""
        self._tasks.start(self._keep_up())

    async def close(self) -> None:
        """Ends after what was begun."""
        await self._tasks.cancel()
        for store in (self.jobs, self.images):
            try:
                await store.close()
            except StorageUnavailable as error:
                _log.warning("the disk did not end in time", extra={"text": error.message})

    def check_writable(self) -> None:
        """Raises why no job can be accepted now."""
        if self.trouble is not None:
            raise self.trouble.with_traceback(None)

    def report_failure(self, error: BottegaError) -> None:
        """Something could not be written."""
        if error.metadata.get("cause") == os_errors.BUSY:
            return  # more than the disk can take at once, which is no fault of it
        if self.trouble is None:
            facts = {"folder": str(self.folder), "text": error.message, **error.metadata}
            full = isinstance(error, TooManyOpenFiles)
            what = "too many files and sockets are open" if full else "the disk cannot be used"
            _log.error("%s; no job is taken", what, extra=facts)
        # What damage there is, and where, is for the log.
        public = (
            DataLoss("the store is damaged; its operator has to look after it")
            if isinstance(error, DataLoss)
            else error
        )
        before, self.trouble = self.trouble, public
        if before is None:
            self.changed.set()

    async def retry_until_written(self, write: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """What `write` returns, tried until the disk takes it. Raises what else it raises."""
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
        self, encoded: Sequence[bytes], latents: Sequence[bytes] = (), *, tenant: str = ""
    ) -> tuple[StoredImage, ...]:
        """Stores finished images: they are on the disk when this returns, which takes as long as the disk does.

        latents: what is kept of each for edits, or empty where nothing is; none at all where nothing is of any.
        tenant: whose they are.
        Raises StorageUnavailable when too much waits for it already, TooLarge for what it never takes.
        """
        latents = latents or [b""] * len(encoded)
        size_bytes = sum(map(len, (*encoded, *latents)))
        if size_bytes > self._room_bytes:
            raise os_errors.unavailable("more images wait for the disk than memory has room for", cause=os_errors.BUSY)
        self._room_bytes -= size_bytes
        try:
            kept = [await digest(data) if data else "" for data in latents]
            images = tuple(
                [
                    StoredImage(
                        digest=await digest(data),
                        size_bytes=len(data),
                        latents=latents_digest,
                        latents_bytes=len(latent),
                    )
                    for data, latent, latents_digest in zip(encoded, latents, kept, strict=True)
                ]
            )
            names = [*(image.digest for image in images), *kept]
            contents = [(name, data) for name, data in zip(names, (*encoded, *latents), strict=True) if name]
            with self.images.pinned([name for name, _ in contents]):
                for name, data in contents:
                    await self.retry_until_written(functools.partial(self.images.put, name, data, owner=tenant))
            return images
        finally:
            self._room_bytes += size_bytes

    async def kept_latents(self, name: str) -> bytes:
        """What is kept of an image, by its own digest; empty where it has gone or cannot be read."""
        try:
            return await self.images.get(name) or b""
        except (StorageUnavailable, DataLoss) as error:
            _log.warning("latents of an image cannot be read", extra={"digest": name, "text": error.message})
            return b""

    async def renew_images(self, images: Sequence[StoredImage]) -> bool:
        """Renew the time of images and of what is kept of them. Return False if one has gone or is damaged."""
        contents = [digest for image in images for digest in image.contents]
        if not all(map(self.images.holds, contents)):
            return False
        return all([await self.images.renew(digest) for digest in contents])

    def pinned(self, images: Sequence[StoredImage]) -> contextlib.AbstractContextManager[None]:
        """Keep images and what is kept of them while the block runs, whoever deletes another job with them."""
        return self.images.pinned([digest for image in images for digest in image.contents])

    async def _open(self) -> None:
        """Opens images first: only the process that has their folder has the jobs, and starts a new generation."""
        marked = not self._steady_continued and clock_file.resume(self.steady, self.folder / _CLOCK)
        self._steady_continued = self._steady_continued or marked
        try:
            await self.images.open()
        except (StorageUnavailable, DataLoss):
            with contextlib.suppress(StorageUnavailable, DataLoss):  # reads of the jobs raise it, and the next try
                await self.jobs.open_to_read()
            raise
        await self.jobs.open()
        await self.images.assign(await self.jobs.contents())
        if not self._steady_continued:
            last = await self.jobs.last_end()
            if last is not None:
                self.steady.go_on_from(last.steady)
            self._steady_continued = True
        self._note_clock()

    def _check_folder(self, error: BottegaError) -> None:
        """Raises ConfigError where only a person mends what has failed: to wait would be to wait for ever."""
        cause = error.metadata.get("cause", "")
        if cause in _UNUSABLE:
            why = os.strerror(getattr(errno, cause)).lower()
            raise ConfigError(
                f"state: the folder {self.folder} cannot be used: {why}; let the gateway have it, or configure another"
            ) from error

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S if self.trouble is None else _RETRY_S)
            try:
                if self.trouble is None:
                    await self._sweep()
                else:
                    await self._probe()
            except (StorageUnavailable, DataLoss) as error:
                self.report_failure(error)
            except Exception:  # noqa: BLE001 - the boundary of the task: without it nothing is ever swept or healed
                _log.exception("the disk could not be looked after")

    async def _probe(self) -> None:
        await self.images.probe()
        if self.jobs.lost:
            await self.jobs.remake(self._live())
        await self.jobs.probe()
        if not self._unwritten:  # what waits tries by itself, and is the better probe: it is larger
            self._recovered()

    def _note_clock(self) -> None:
        now = self.steady()
        if now - self._clock_noted_at >= _CLOCK_S:
            self._clock_noted_at = now
            clock_file.note(self.steady, self.folder / _CLOCK)

    async def _sweep(self) -> None:
        self._note_clock()
        while await self.images.sweep():
            pass
        ended_before = self.steady() - self._jobs_ttl_s
        forgotten = _SWEEP_JOBS
        while forgotten == _SWEEP_JOBS:
            forgotten = await self.jobs.forget(
                ended_before=ended_before, max_jobs=self._max_jobs, max_bytes=self._jobs_bytes, limit=_SWEEP_JOBS
            )

    def _recovered(self) -> None:
        before, self.trouble = self.trouble, None
        if before is not None:
            full = isinstance(before, TooManyOpenFiles)
            _log.info("files can be opened again" if full else "the disk can be used again")
            self.changed.set()


async def _no_jobs() -> AsyncIterator[tuple[JobRecord, bytes]]:
    nothing: tuple[tuple[JobRecord, bytes], ...] = ()
    for job in nothing:
        yield job
