"""Writes to the job store, in order for each job: every write is tried until the disk takes it.

A worker does not wait until it is written that it has a job; the end of the job is still written after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError
from bottega.gateway.jobs.storage import Storage

ResultT = TypeVar("ResultT")

# Writes that wait when the gateway stops are done within this time, unless the disk is gone.
_CLOSE_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingWrite:
    """result: None where nobody waits for it."""

    write: Callable[[], Awaitable[Any]]
    result: asyncio.Future[Any] | None = None


class WriteQueue:
    """A queue for each job that has something to be written; at most two writes that nobody waits for are in each."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._queues: dict[str, deque[_PendingWrite]] = {}
        self._tasks = BackgroundTasks("writing of jobs")

    def enqueue(self, job_id: str, write: Callable[[], Awaitable[object]]) -> None:
        """Queues a write that nobody waits for. It replaces the last one that waits, if nobody waits for that either.

        So each such write has to say all of a job's status: then only the newest counts.
        """
        queue = self._queues.get(job_id)
        if queue and len(queue) > 1 and queue[-1].result is None:
            queue.pop()  # not the first: that one is being written
        self._append(job_id, _PendingWrite(write=write))

    async def enqueue_and_wait(self, job_id: str, write: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """What `write` returns, after all earlier writes of the job.

        Raises CancelledError when `close` has given up on it.
        """
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._append(job_id, _PendingWrite(write=write, result=result))
        return await result

    async def close(self) -> None:
        """Finishes the writes that wait, as far as there is time; the next life of the gateway repeats the rest."""
        await self._tasks.join(_CLOSE_S)
        await self._tasks.cancel()

    def _append(self, job_id: str, pending: _PendingWrite) -> None:
        queue = self._queues.get(job_id)
        if queue is not None:
            queue.append(pending)
            return
        self._queues[job_id] = deque([pending])
        self._tasks.start(self._drain(job_id))

    async def _drain(self, job_id: str) -> None:
        queue = self._queues[job_id]
        try:
            while queue:
                await self._run(queue[0])
                queue.popleft()
        finally:
            del self._queues[job_id]
            for pending in queue:  # the gateway stops: nobody will write these
                if pending.result is not None:
                    pending.result.cancel()

    async def _run(self, pending: _PendingWrite) -> None:
        try:
            result = await self._storage.retry_until_written(pending.write)
        except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
            if pending.result is not None and not pending.result.done():
                pending.result.set_exception(error)
            elif not isinstance(error, BottegaError):
                _log.exception("something could not be written of a job")
            return
        if pending.result is not None and not pending.result.done():
            pending.result.set_result(result)
