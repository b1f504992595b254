"""One thread that runs blocking work in the order in which it was queued, or in turns by owner.

State that only such a thread uses needs no lock. An event loop awaits `run`; threads use `call`, or `post` if nothing
waits for the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, TypeVar

from bottega.errors import StorageUnavailable
from bottega.storage.os_errors import BUSY, unavailable

ResultT = TypeVar("ResultT")

# Time for a disk that hangs; a healthy one answers within milliseconds.
_WAIT_S = 30.0
# A timer that fires so much later than it was set for shows that this process was stopped itself.
_LATE_S = 1.0
# More than a service has calls at once: beyond it the disk is the bottleneck, and callers should get an error.
_MAX_WAITING = 1024
# Of a FairThread, one call runs, and the next one waits in the thread's own queue.
_FAIR_AT_ONCE = 2
# Maximum number of waiting calls of one owner: more than the streams that a gateway serves at once.
_MAX_WAITING_OF_OWNER = 4096

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class SerialTask:
    """A piece of work and its result, which is delivered after the whole group of the task is done."""

    do: Callable[[], Any]
    outcome: asyncio.Future[Any] | Future[Any] | None = None
    """Future that the caller waits for; None if no caller waits for the result."""
    size_bytes: int = 0
    """Approximate number of bytes that the task writes."""
    result: Any = None
    error: BaseException | None = None

    @property
    def wanted(self) -> bool:
        """Whether the work is still needed. False if its caller has given up."""
        return self.outcome is None or not self.outcome.done()

    def deliver(self) -> None:
        """Complete the caller's future, in its event loop if it has one. Log the error if no caller waits."""
        if self.outcome is None:
            if self.error is not None:
                _log.error("work in the background failed", exc_info=self.error)
            return
        with contextlib.suppress(InvalidStateError, asyncio.InvalidStateError):  # the caller has given up
            if self.error is not None:
                self.outcome.set_exception(self.error)
            else:
                self.outcome.set_result(self.result)


def one_by_one(group: Sequence[SerialTask]) -> None:
    """Run each piece of work on its own."""
    for task in group:
        if task.wanted:
            try:
                task.result = task.do()
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
                task.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGroups:
    """How waiting tasks form groups that are run together."""

    serve: Callable[[Sequence[SerialTask]], None] = one_by_one
    """Runs a group and sets the result or error of each task; must not raise."""
    max_tasks: int = 1
    """Maximum number of tasks in a group."""
    max_bytes: int = 1
    """Bytes from which a group accepts no more tasks."""


class SerialThread:
    """A thread that runs queued work in order. It starts with the first work; end it with `close` or `end`.

    Args:
        groups: How waiting tasks form groups; by default each is run on its own.
        max_waiting: Maximum number of tasks of `run` that may wait. Callers of `post` must limit what they queue.
        wait_s: Seconds after which callers give up.
        tick: Called regularly between other work, even if work waits.
        tick_s: Seconds between calls of `tick`.
        niceness: Added to the thread's nice value on Linux, so that other threads run first on the same core.
    """

    def __init__(
        self,
        name: str,
        *,
        groups: TaskGroups | None = None,
        max_waiting: int = _MAX_WAITING,
        wait_s: float = _WAIT_S,
        tick: Callable[[], None] | None = None,
        tick_s: float = 0.0,
        niceness: int = 0,
    ) -> None:
        self._groups = groups or TaskGroups()
        self._max_waiting = max_waiting
        self._wait_s = wait_s
        self._tick = tick
        self._tick_s = tick_s
        self._niceness = niceness
        self._queue: queue.SimpleQueue[SerialTask | None] = queue.SimpleQueue()
        # A daemon, because nothing else lets a process end while its disk hangs.
        self._thread = threading.Thread(target=self._serve_all, name=name, daemon=True)
        self._lock = threading.Lock()
        self._started = self._closed = False
        self._tick_due_s = 0.0

    @property
    def waiting(self) -> int:
        """Number of tasks that wait."""
        return self._queue.qsize()

    async def run(self, do: Callable[[], ResultT], *, size_bytes: int = 0) -> ResultT:
        """Run `do` in the thread, and return its result.

        Raises StorageUnavailable if too many tasks wait, if it takes too long, and after `close`. Then, and if the
        caller is cancelled, work that has begun continues to its end, and other work is dropped.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[ResultT] = loop.create_future()
        self._enqueue(SerialTask(do=do, size_bytes=size_bytes, outcome=outcome), max_waiting=self._max_waiting)
        giving_up: asyncio.TimerHandle

        def give_up(due: float) -> None:
            nonlocal giving_up
            if loop.time() - due > _LATE_S:  # this process was stopped, and the thread with it
                giving_up = loop.call_at(loop.time() + _LATE_S, give_up, loop.time() + _LATE_S)
            elif not outcome.done():
                outcome.set_exception(unavailable("the disk does not answer", cause="ETIMEDOUT"))

        due = loop.time() + self._wait_s
        giving_up = loop.call_at(due, give_up, due)
        try:
            return await outcome
        finally:
            giving_up.cancel()

    def call(self, do: Callable[[], ResultT], *, wait_s: float | None = None) -> ResultT:
        """Run `do` in the thread after all work that was queued before, and return its result. Not for event loops.

        Raises StorageUnavailable if that takes longer than `wait_s`, and after the end. Work that has begun continues.
        """
        outcome: Future[ResultT] = Future()
        self._enqueue(SerialTask(do=do, outcome=outcome))
        try:
            return outcome.result(self._wait_s if wait_s is None else wait_s)
        except FutureTimeoutError:
            if not outcome.cancel():
                return outcome.result()  # it has just ended, or `do` raised a TimeoutError
            raise unavailable("the disk does not answer", cause="ETIMEDOUT") from None

    def post(self, do: Callable[[], None]) -> None:
        """Queue work without waiting for its result. Errors are logged. Work is dropped after the end of the thread."""
        with contextlib.suppress(StorageUnavailable):
            self._enqueue(SerialTask(do=do))

    async def close(self) -> None:
        """End the thread after the queued work. Raises StorageUnavailable if that takes too long."""
        if self._started and not self._closed and not await asyncio.to_thread(self.end):
            raise unavailable("the disk does not answer", cause="ETIMEDOUT")

    def end(self, *, wait_s: float | None = None, drop_waiting: bool = False) -> bool:
        """End the thread after the waiting work, or before it with `drop_waiting`. Return whether it ended in time."""
        with self._lock:
            if not self._started:
                self._closed = True
                return True
            if not self._closed:
                self._closed = True
                if drop_waiting:
                    self._drop_waiting()
                self._queue.put(None)
        self._thread.join(self._wait_s if wait_s is None else wait_s)
        return not self._thread.is_alive()

    def _enqueue(self, task: SerialTask, *, max_waiting: int | None = None) -> None:
        with self._lock:
            if self._closed:
                raise unavailable("the storage is closed", cause="ESHUTDOWN")
            if not self._started:
                self._started = True
                self._thread.start()
            if max_waiting is not None and self._queue.qsize() >= max_waiting:
                raise unavailable("too many operations wait for the disk", cause=BUSY)
            self._queue.put(task)

    def _drop_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                task = self._queue.get_nowait()
                if task is not None and task.outcome is not None:
                    task.error = unavailable("the storage is closed", cause="ESHUTDOWN")
                    _deliver([task])

    def _serve_all(self) -> None:
        if self._niceness and sys.platform == "linux":  # elsewhere, threads have no priority of their own
            thread = threading.get_native_id()
            # Added, because only root may lower a nice value that the process has already.
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self._niceness)
        self._tick_due_s = time.monotonic() + self._tick_s
        while (first := self._next()) is not None:
            group, ended = self._group(first)
            del first
            self._groups.serve(group)
            _deliver(group)
            del group  # so that what the work holds is freed
            if ended:
                return

    def _next(self) -> SerialTask | None:
        """Return `tick` if it is due, even if tasks wait, else the next task. None means that the thread ends."""
        if self._tick is None:
            return self._queue.get()
        left_s = self._tick_due_s - time.monotonic()
        try:
            return self._queue.get(timeout=left_s) if left_s > 0.0 else SerialTask(do=self._run_tick)
        except queue.Empty:
            return SerialTask(do=self._run_tick)

    def _run_tick(self) -> None:
        assert self._tick is not None, "only a thread with a tick runs it"
        try:
            self._tick()
        finally:
            self._tick_due_s = time.monotonic() + self._tick_s

    def _group(self, first: SerialTask) -> tuple[list[SerialTask], bool]:
        """Return `first` with further waiting tasks within the limits, and whether the end of the queue was reached."""
        group, size_bytes = [first], first.size_bytes
        with contextlib.suppress(queue.Empty):
            while len(group) < self._groups.max_tasks and size_bytes < self._groups.max_bytes:
                task = self._queue.get_nowait()
                if task is None:
                    return group, True
                group.append(task)
                size_bytes += task.size_bytes
        return group, False


def _deliver(group: Sequence[SerialTask]) -> None:
    """Deliver the results of a group. Those for one event loop go together, because waking it is expensive."""
    awaited = [task for task in group if isinstance(task.outcome, asyncio.Future)]
    for task in group:
        if not isinstance(task.outcome, asyncio.Future):
            task.deliver()

    def deliver() -> None:
        for task in awaited:
            task.deliver()

    if awaited:
        outcome = awaited[0].outcome
        assert isinstance(outcome, asyncio.Future)
        with contextlib.suppress(RuntimeError):  # a closed loop awaits nothing
            outcome.get_loop().call_soon_threadsafe(deliver)


class FairTurns:
    """Turns of several owners for work of which a few pieces run at once. It is used by one event loop.

    Args:
        at_once: Number of turns at the same time.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._running = 0
        # Waiting calls by owner; the owner whose turn is next comes first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for the owner's turn, and hold it during the block. Raise StorageUnavailable if too many calls wait."""
        await self._wait_for_turn(owner)
        try:
            yield
        finally:
            self._end_turn()

    async def _wait_for_turn(self, owner: str) -> None:
        if self._running < self._at_once and not self._waiting:
            self._running += 1
            return
        calls = self._waiting.setdefault(owner, deque())
        if len(calls) >= _MAX_WAITING_OF_OWNER:
            raise unavailable("too many operations wait for the disk", cause=BUSY)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        calls.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had come
                self._end_turn()
            raise

    def _end_turn(self) -> None:
        self._running -= 1
        while self._waiting and self._running < self._at_once:
            owner = next(iter(self._waiting))
            calls = self._waiting.pop(owner)
            turn = calls.popleft()
            if calls:
                self._waiting[owner] = calls
            if not turn.done():
                self._running += 1
                turn.set_result(None)


class FairThread:
    """A thread that runs blocking work of several owners in turns. It is used by one event loop."""

    def __init__(self, name: str) -> None:
        self._thread = SerialThread(name)
        self._turns = FairTurns(_FAIR_AT_ONCE)

    async def run(self, do: Callable[[], ResultT], *, owner: str) -> ResultT:
        """Run `do` in the owner's turn, and return its result. Raise StorageUnavailable as SerialThread.run does."""
        async with self._turns.turn(owner):
            return await self._thread.run(do)

    async def close(self) -> None:
        """End the thread after the work that has begun."""
        await self._thread.close()
