"""Tasks that run beside the code that starts them: logged when they fail, bounded, and ended with their owner."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from bottega.errors import QueueFull

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """name: of what they do, for the log. max_tasks: that run at once; None is without a bound.

    Its owner ends it with `join`, which waits for all of them, or with `cancel`. A task is cancelled only after it has
    begun, so that it gives back what it was handed and says in its own words why it ends; so is one that is started
    while `cancel` waits.
    """

    def __init__(self, name: str, *, max_tasks: int | None = None) -> None:
        self._name = name
        self._max_tasks = max_tasks
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelling = False

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Runs it. What it raises is logged. Raises QueueFull where as many run as may."""
        task = self._run(work)
        task.add_done_callback(self._log_failure)
        return task

    async def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What `work` returns or raises. It is cancelled with its caller. Raises QueueFull where as many run as may."""
        return await self._run(work)

    async def run_shielded(
        self, work: Coroutine[Any, Any, ResultT], *, on_abandoned: Callable[[ResultT], None] | None = None
    ) -> ResultT:
        """What `work` returns or raises. A caller that is cancelled meanwhile leaves it to run to its end.

        on_abandoned: is given what it returns in that case. Raises QueueFull where as many run as may.
        """
        task = self._run(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if on_abandoned is not None:
                task.add_done_callback(functools.partial(_hand_over, on_abandoned))
            raise

    async def join(self, timeout_s: float | None = None) -> None:
        """Returns when all have ended, those that start meanwhile too, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while others := self._others():
                    await asyncio.wait(others)

    def cancel_soon(self) -> None:
        """Cancels all, and does not wait until they have ended."""
        for task in self._others():
            _cancel_when_begun(task)

    async def cancel(self) -> None:
        """Cancels all, those that start meanwhile too, and returns when they have ended."""
        self._cancelling = True
        try:
            self.cancel_soon()
            await self.join()
        finally:
            self._cancelling = False

    def _others(self) -> set[asyncio.Task[Any]]:
        """All but the one that asks, which cannot wait for itself."""
        return self._tasks - {asyncio.current_task()}

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        if self._max_tasks is not None and len(self._tasks) >= self._max_tasks:
            work.close()
            raise QueueFull(f"{self._name}: {self._max_tasks} run already, as many as may at once")
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._cancelling:
            _cancel_when_begun(task)
        return task

    def _log_failure(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("a background task failed", extra={"task": self._name}, exc_info=error)


@contextlib.asynccontextmanager
async def running(work: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Runs `work` beside the block, and ends it with the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _cancel_when_begun(task: asyncio.Task[Any]) -> None:
    """At once, unless it is still to begin: cancelled before that, no line of its work would run, nor any `finally`."""
    work = task.get_coro()
    if isinstance(work, Coroutine) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
        task.get_loop().call_soon(task.cancel)  # its first step was scheduled before this
    else:
        task.cancel()


async def run_until_first_ends(*works: Coroutine[Any, Any, object]) -> None:
    """Runs all of them at once until the first ends, and then cancels the others. Raises what that one raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _hand_over(receiver: Callable[[ResultT], None], task: asyncio.Task[ResultT]) -> None:
    if not task.cancelled() and task.exception() is None:
        receiver(task.result())
