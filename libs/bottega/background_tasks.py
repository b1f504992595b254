"""Background tasks that end with their owner, work that goes on if its caller is cancelled, and work in threads."""

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

# Copying, packing and parsing 1 MiB costs up to a millisecond of CPU, hashing it somewhat more; handing it to a thread
# costs some hundred microseconds.
LARGE_BYTES = 256 * 2**10

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """A set of tasks that run beside the code that starts them.

    The owner ends them with `join`, which waits for all of them, or with `cancel`. A task is cancelled only after it
    has begun, so that it can release what it was given. A task that is started while `cancel` waits is cancelled, too.

    Args:
        name: What the tasks do, for the log.
        max_tasks: Maximum number of concurrent tasks; None for no limit.
    """

    def __init__(self, name: str, *, max_tasks: int | None = None) -> None:
        self._name = name
        self._max_tasks = max_tasks
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelling = False

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Start a task. If it fails, that is logged. Raise QueueFull if too many tasks run."""
        task = self._run(work)
        task.add_done_callback(self._log_failure)
        return task

    async def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run `work` as a task, and return its result.

        It is cancelled with its caller. Raises QueueFull if too many tasks run.
        """
        return await self._run(work)

    async def run_shielded(
        self, work: Coroutine[Any, Any, ResultT], *, on_abandoned: Callable[[ResultT], None] | None = None
    ) -> ResultT:
        """Run `work` as a task, and return its result. It runs to its end even if the caller is cancelled.

        Raises QueueFull if too many tasks run.

        Args:
            on_abandoned: Called with the result if the caller was cancelled.
        """
        task = self._run(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if on_abandoned is not None:
                task.add_done_callback(functools.partial(_hand_over, on_abandoned))
            raise

    async def join(self, timeout_s: float | None = None) -> None:
        """Wait until all tasks have ended, including those started meanwhile, or until the time-out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while others := self._others():
                    await asyncio.wait(others)

    def cancel_soon(self) -> None:
        """Cancel all tasks without waiting for their end."""
        for task in self._others():
            _cancel_when_begun(task)

    async def cancel(self) -> None:
        """Cancel all tasks, including those started meanwhile, and wait until they have ended."""
        self._cancelling = True
        try:
            self.cancel_soon()
            await self.join()
        finally:
            self._cancelling = False

    def _others(self) -> set[asyncio.Task[Any]]:
        """Return all tasks except the current one, which cannot wait for itself."""
        return self._tasks - {asyncio.current_task()}

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        if self._max_tasks is not None and len(self._tasks) >= self._max_tasks:
            work.close()
            raise QueueFull(f"{self._name}: {self._max_tasks} run already, which is the limit")
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
    """Run `work` during the `with` block, and cancel it at the end of the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _cancel_when_begun(task: asyncio.Task[Any]) -> None:
    """Cancel a task after it has begun. Otherwise none of its code would run, not even a `finally`."""
    work = task.get_coro()
    if isinstance(work, Coroutine) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
        task.get_loop().call_soon(task.cancel)  # its first step is scheduled already, so it runs before this
    else:
        task.cancel()


async def run_until_first_ends(*works: Coroutine[Any, Any, object]) -> None:
    """Run all of `works` until the first ends, then cancel the others. Raise the first one's error, if any."""
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


async def run_to_end(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `work` to its end, and return its result. If the caller is cancelled, raise CancelledError after that.

    Use it for work that must not stop halfway, such as creating or removing a file.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved, because CancelledError is raised in its place
        raise cancelled
    return task.result()


@contextlib.asynccontextmanager
async def acquired(make: Callable[[], ResultT], unmake: Callable[[ResultT], object]) -> AsyncIterator[ResultT]:
    """Yield the result of `make`, and pass it to `unmake` after the `with` block, even if the caller is cancelled.

    Both run in threads, and may raise.
    """
    made: list[ResultT] = []
    try:
        await run_to_end(asyncio.to_thread(lambda: made.append(make())))
        yield made[0]
    finally:
        for resource in made:
            await run_to_end(asyncio.to_thread(unmake, resource))


async def copied(size_bytes: int, work: Callable[[], ResultT]) -> ResultT:
    """Return the result of `work`, run on the event loop if it is short, or in a thread if it is long.

    Args:
        size_bytes: Bytes that `work` reads or copies once or twice. It must not block otherwise.
    """
    return work() if size_bytes <= LARGE_BYTES else await asyncio.to_thread(work)
