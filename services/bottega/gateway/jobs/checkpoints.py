"""Checkpoints of running jobs as objects that gateways share, so that the next scheduler goes on from them.

    <SHA-256 of the job's ID>-<steps done>-<SHA-256 of the content>

The content is a line of JSON with the versions of the job's ControlNets, then the checkpoint. The name has everything
that a reader checks, and a new checkpoint has another name than the one before, which is deleted after it is written.
So a reader finds a whole checkpoint at any time, and a former scheduler that still writes does no harm.

A job whose worker lives does not need them: the worker goes on, and sends its newest checkpoint again.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prometheus_client import Counter

from bottega.background_tasks import BackgroundTasks
from bottega.errors import StorageUnavailable
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.values import JobCheckpoint
from bottega.storage.objects import ObjectStore, StoredObject

ResultT = TypeVar("ResultT")

CHECKPOINT_NAMES = re.compile(r"[0-9a-f]{64}-[0-9]{9}-[0-9a-f]{64}")
"""Names of the objects."""
_TRANSFERS = 8
# Time for which a new scheduler that has read its jobs waits for their checkpoints. Later ones count for jobs that
# still wait then.
_RESTORE_S = 0.5
# Checkpoints of jobs that have ended are deleted with their jobs, and by the next sweep if that failed. The first sweep
# is early, because a scheduler may live for minutes.
_FIRST_SWEEP_S, _SWEEP_S = 300.0, 3600.0
# Another gateway may have written a younger one for a job that this one does not know yet.
_SETTLED_S = 60.0

_log = logging.getLogger(__name__)


class SharedCheckpoints:
    """The newest checkpoint of each running job, in an object store. It is used by one event loop.

    A failure costs at most repeated steps: it is logged when failures begin, and counted.

    Args:
        objects: The store of objects, whose names match CHECKPOINT_NAMES.
        outcomes: Counts checkpoints, by outcome.
    """

    def __init__(self, objects: ObjectStore, *, outcomes: Counter) -> None:
        self._objects = objects
        self._outcomes = outcomes
        self._names: dict[str, set[str]] = {}
        """Names of the objects of each job, by its ID."""
        self._storing: set[str] = set()
        """IDs of the jobs whose checkpoints are being written."""
        self._tasks = BackgroundTasks("checkpoints in the object storage")
        self._threads = ThreadPoolExecutor(_TRANSFERS, thread_name_prefix="checkpoints")
        self._failing = self._closed = False

    async def restore(self, reading_jobs: Awaitable[list[Job]], live: Callable[[], Iterable[Job]]) -> list[Job]:
        """Return the jobs, with the checkpoints that another scheduler wrote, and begin to delete those of ended jobs.

        The objects are listed while the jobs are read.

        Args:
            reading_jobs: Reads the jobs that have not ended.
            live: Returns the jobs that have not ended, later on.
        """
        await self._tasks.cancel()
        listing = self._tasks.start(self._run(lambda: list(self._objects.objects())))
        jobs = await reading_jobs
        reading = self._tasks.start(self._read_all(jobs, listing))
        self._tasks.start(self._keep_sweeping(live))
        await asyncio.wait({reading}, timeout=_RESTORE_S)
        return jobs

    def store(self, job: Job) -> None:
        """Write the newest checkpoint of a running job soon. One that comes meanwhile replaces it."""
        if job.job_id not in self._storing and not self._closed:
            self._storing.add(job.job_id)
            self._tasks.start(self._store(job))

    def forget(self, job: Job) -> None:
        """Delete the checkpoints of a job that has ended."""
        if job.job_id in self._names and job.job_id not in self._storing and not self._closed:
            self._tasks.start(self._remove(job.job_id, but=""))

    async def close(self) -> None:
        """Stop. Transfers that have not begun are dropped."""
        self._closed = True
        await self._tasks.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _store(self, job: Job) -> None:
        stored = None
        try:
            while job.open and job.checkpoint is not None and job.checkpoint is not stored:
                stored = job.checkpoint
                name = await self._run(functools.partial(self._write, job.job_id, dict(job.versions), stored))
                if name is None:
                    return  # the next checkpoint is another try
                self._names.setdefault(job.job_id, set()).add(name)
                self._outcomes.labels("stored").inc()
                await self._remove(job.job_id, but=name)
        finally:
            self._storing.discard(job.job_id)
            if not job.live:
                self.forget(job)

    def _write(self, job_id: str, versions: dict[str, str], checkpoint: JobCheckpoint) -> str:
        data = json.dumps(versions).encode() + b"\n" + checkpoint.data
        name = f"{_tag(job_id)}-{checkpoint.steps_done:09d}-{hashlib.sha256(data).hexdigest()}"
        self._objects.write(name, data)
        return name

    async def _remove(self, job_id: str, *, but: str) -> None:
        names = self._names.get(job_id, set()) - {but}
        if not names or not await self._run(lambda: self._removed(names)):
            return
        left = self._names.get(job_id, set())
        left -= names
        if not left:
            self._names.pop(job_id, None)

    def _removed(self, names: Iterable[str]) -> bool:
        self._objects.remove(names)
        return True

    async def _read_all(self, jobs: Iterable[Job], listing: Awaitable[list[StoredObject] | None]) -> None:
        by_tag = {_tag(job.job_id): job for job in jobs}
        found: dict[str, list[StoredObject]] = {}
        for file in await listing or ():
            if file.name[:64] in by_tag:
                found.setdefault(file.name[:64], []).append(file)
        for tag, files in found.items():
            self._names.setdefault(by_tag[tag].job_id, set()).update(file.name for file in files)
        newest = {tag: max(files, key=lambda file: file.name) for tag, files in found.items()}
        await asyncio.gather(*(self._read(by_tag[tag], file) for tag, file in newest.items()))

    async def _read(self, job: Job, found: StoredObject) -> None:
        _, steps_done, digest = found.name.split("-")
        read = functools.partial(
            self._objects.read, found.name, digest=bytes.fromhex(digest), size_bytes=found.size_bytes
        )
        data = await self._run(read)
        if data is None:
            self._outcomes.labels("lost").inc()
        elif job.adopt_checkpoint(*_parsed(data, int(steps_done))):
            self._outcomes.labels("restored").inc()
            _log.info(
                "a job goes on from the checkpoint in the object storage, unless its worker still runs it",
                extra={"job": job.job_id, "steps_done": int(steps_done)},
            )

    async def _keep_sweeping(self, live: Callable[[], Iterable[Job]]) -> None:
        await asyncio.sleep(_FIRST_SWEEP_S)
        while True:
            await self.sweep(live)
            await asyncio.sleep(_SWEEP_S)

    async def sweep(self, live: Callable[[], Iterable[Job]]) -> None:
        """Delete the checkpoints of jobs that are not live."""
        listed = await self._run(lambda: list(self._objects.objects()))
        tags = {_tag(job.job_id) for job in live()}
        names = [file.name for file in listed or () if file.age_s > _SETTLED_S and file.name[:64] not in tags]
        if names:
            await self._run(lambda: self._removed(names))

    async def _run(self, do: Callable[[], ResultT]) -> ResultT | None:
        """Run a call of the object store in a thread. Return None if it fails."""
        try:
            done = await asyncio.get_running_loop().run_in_executor(self._threads, do)
        except StorageUnavailable as error:
            self._outcomes.labels("failed").inc()
            if not self._failing:
                self._failing = True
                _log.warning(
                    "checkpoints cannot be stored or read now; a job begins again if its worker and its scheduler fail",
                    extra={"text": error.message},
                )
            return None
        if self._failing:
            self._failing = False
            _log.info("checkpoints can be stored again")
        return done


def _tag(job_id: str) -> str:
    return hashlib.sha256(job_id.encode()).hexdigest()


def _parsed(data: bytes, steps_done: int) -> tuple[JobCheckpoint, dict[str, str]]:
    versions, _, checkpoint = data.partition(b"\n")
    return JobCheckpoint(steps_done=steps_done, data=checkpoint), json.loads(versions)
