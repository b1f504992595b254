"""What becomes of jobs is written in order: of each job one thing after the other, each until it is written.

A worker is not kept waiting for the note that it has a job; the note of the end comes after it all the same. Knows
nothing of what is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from bottega.errors import BottegaError
from bottega.gateway.jobs.storage import Storage

ResultT = TypeVar("ResultT")

# What waits for the disk when the gateway stops is written, unless the disk is gone.
_CLOSE_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingWrite:
    """outcome: None where nobody waits for it. newest_of: see WriteQueue.note."""

    write: Callable[[], Awaitable[Any]]
    outcome: asyncio.Future[Any] | None = None
    newest_of: str = ""


class WriteQueue:
    """One trail for each job that something is to be written of. Bounded by what may happen to a job."""

    def __init__(self, storehouse: Storage) -> None:
        self._storehouse = storehouse
        self._steps: dict[str, deque[_PendingWrite]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def note(self, job_id: str, write: Callable[[], Awaitable[object]], *, newest_of: str = "") -> None:
        """Has it written; nobody waits for it.

        newest_of: what it is one of, where only the newest one counts: it takes the place of one that waits. For what
        callers may do to a job as often as they like.
        """
        self._add(job_id, _PendingWrite(write=write, newest_of=newest_of))

    async def written(self, job_id: str, write: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """What `write` returns when it could be written, after all that was to be written of the job before.

        Raises CancelledError where `close` could not wait for it.
        """
        outcome: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._add(job_id, _PendingWrite(write=write, outcome=outcome))
        return await outcome

    async def close(self) -> None:
        """Writes what waits, for a moment; what is left then is done again by the next life."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _add(self, job_id: str, step: _PendingWrite) -> None:
        steps = self._steps.get(job_id)
        if steps is not None:
            if step.newest_of and len(steps) > 1 and steps[-1].newest_of == step.newest_of:
                steps.pop()  # not the first: that one is being written
            steps.append(step)
            return
        self._steps[job_id] = deque([step])
        task = asyncio.create_task(self._follow(job_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, job_id: str) -> None:
        steps = self._steps[job_id]
        try:
            while steps:
                await self._take(steps[0])
                steps.popleft()
        finally:
            del self._steps[job_id]
            for step in steps:  # at the end of this gateway: nobody comes to write them
                if step.outcome is not None:
                    step.outcome.cancel()

    async def _take(self, step: _PendingWrite) -> None:
        try:
            result = await self._storehouse.insist(step.write)
        except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
            if step.outcome is not None and not step.outcome.done():
                step.outcome.set_exception(error)
            elif not isinstance(error, BottegaError):
                _log.exception("something could not be written of a job")
            return
        if step.outcome is not None and not step.outcome.done():
            step.outcome.set_result(result)
