"""The queue of writes to the job store, in order for each job. Every write is retried until the disk takes it.

A worker gets a job before that is written, but the end of the job is still written after it.
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

# Time for the writes that wait when the gateway stops; they take longer only if the disk is gone.
_CLOSE_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingWrite:
    write: Callable[[], Awaitable[Any]]
    result: asyncio.Future[Any] | None = None
    """The result for the caller that waits for the write; None if no caller does."""


class WriteQueue:
    """A queue of writes for each job that has any; at most two writes that no caller waits for are in each."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._queues: dict[str, deque[_PendingWrite]] = {}
        self._tasks = BackgroundTasks("writing of jobs")

    def enqueue(self, job_id: str, write: Callable[[], Awaitable[object]]) -> None:
        """Queue a write that no caller waits for. It replaces the last such write that has not begun.

        So each of these writes has to contain the whole status of a job.
        """
        queue = self._queues.get(job_id)
        if queue and len(queue) > 1 and queue[-1].result is None:
            queue.pop()  # not the first: that one is being written
        self._append(job_id, _PendingWrite(write=write))

    async def enqueue_and_wait(self, job_id: str, write: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Return what `write` returns, after all earlier writes of the job.

        Raises CancelledError if `close` has given up on it.
        """
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._append(job_id, _PendingWrite(write=write, result=result))
        return await result

    async def close(self) -> None:
        """Finish the writes that wait, as far as there is time; the next life of the gateway repeats the rest."""
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
            for pending in queue:  # the gateway stops: these will not be written
                if pending.result is not None:
                    pending.result.cancel()

    async def _run(self, pending: _PendingWrite) -> None:
        try:
            result = await self._storage.retry_until_written(pending.write)
        except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
            if pending.result is not None and not pending.result.done():
                pending.result.set_exception(error)
            elif not isinstance(error, BottegaError):
                _log.exception("a write of a job failed unexpectedly")
            return
        if pending.result is not None and not pending.result.done():
            pending.result.set_result(result)
