"""One thread that does blocking work in the order in which it came, for an event loop that only awaits.

What only such a thread touches needs no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bottega.storage.os_errors import BUSY, unavailable

ResultT = TypeVar("ResultT")

# Of a disk that hangs; a healthy one takes milliseconds.
_WAIT_S = 30.0
# A wait that ends so much later than it was to says that this process was stopped itself.
_LATE_S = 1.0
# More than a service has calls at once: beyond it the disk is the bottleneck, and callers should get an error.
_MAX_WAITING = 1024


@dataclass(slots=True, kw_only=True, eq=False)
class StorageTask:
    """Something to do, and how it ended. size_bytes: about what it writes. outcome: belongs to the event loop.

    The thread that serves it sets `result` or `error`; the last value counts, and is passed on when the whole group was
    served.
    """

    do: Callable[[], Any]
    outcome: asyncio.Future[Any]
    size_bytes: int = 0
    result: Any = None
    error: BaseException | None = None

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits for it. Ask before doing it."""
        return not self.outcome.done()

    def deliver(self) -> None:
        """Ends the wait for it. In the event loop."""
        if self.outcome.done():
            return
        if self.error is not None:
            self.outcome.set_exception(self.error)
        else:
            self.outcome.set_result(self.result)


def one_by_one(group: Sequence[StorageTask]) -> None:
    """Does each piece of work by itself."""
    for work in group:
        if work.wanted:
            try:
                work.result = work.do()
            except BaseException as error:  # noqa: BLE001 - it is raised where the work is awaited
                work.error = error


class StorageThread:
    """Starts with the first work; close it when it is no longer needed. Everything is awaited in one event loop.

    serve: does a group of work and says how each piece of it ended; it does not raise. max_group, max_group_bytes: a
    group is what waits, up to so much of it. max_waiting: pieces of work that may wait. wait_s: seconds until the
    caller of one that has not ended gives up.
    """

    def __init__(
        self,
        name: str,
        *,
        serve: Callable[[Sequence[StorageTask]], None] = one_by_one,
        max_group: int = 1,
        max_group_bytes: int = 1,
        max_waiting: int = _MAX_WAITING,
        wait_s: float = _WAIT_S,
    ) -> None:
        self._serve = serve
        self._max_group = max_group
        self._max_group_bytes = max_group_bytes
        # Tasks come from the event loop alone, so that checking the length before adding keeps the bound.
        self._queue: queue.SimpleQueue[StorageTask | None] = queue.SimpleQueue()
        self._max_waiting = max_waiting
        # A daemon, because nothing else lets a process end while its disk hangs.
        self._thread = threading.Thread(target=self._serve_all, name=name, daemon=True)
        self._wait_s = wait_s
        self._started = self._closed = False

    @property
    def waiting(self) -> int:
        """Pieces of work that wait."""
        return self._queue.qsize()

    async def run(self, do: Callable[[], ResultT], *, size_bytes: int = 0) -> ResultT:
        """What `do` returns or raises.

        Raises StorageUnavailable when too much waits already, when it takes too long, and after close(). Then, and
        when the caller is cancelled, work that has begun goes on to its end, and other work is dropped.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[ResultT] = loop.create_future()
        self._enqueue(StorageTask(do=do, size_bytes=size_bytes, outcome=outcome))
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

    async def close(self) -> None:
        """Ends the thread after the work that waits. Raises StorageUnavailable when that takes too long."""
        if self._started and not self._closed:
            self._closed = True
            await asyncio.to_thread(self._end)

    def _enqueue(self, work: StorageTask) -> None:
        if self._closed:
            raise unavailable("the storage is closed", cause="ESHUTDOWN")
        if not self._started:
            self._started = True
            self._thread.start()
        if self._queue.qsize() >= self._max_waiting:
            raise unavailable("too many operations wait for the disk", cause=BUSY)
        self._queue.put(work)

    def _serve_all(self) -> None:
        while (first := self._queue.get()) is not None:
            group, ended = self._group(first)
            del first
            self._serve(group)
            _deliver(group)
            del group  # what the work holds goes with it
            if ended:
                return

    def _group(self, first: StorageTask) -> tuple[list[StorageTask], bool]:
        """`first` and what else waits, within the bounds; and whether the end was among it."""
        group, size_bytes = [first], first.size_bytes
        with contextlib.suppress(queue.Empty):
            while len(group) < self._max_group and size_bytes < self._max_group_bytes:
                work = self._queue.get_nowait()
                if work is None:
                    return group, True
                group.append(work)
                size_bytes += work.size_bytes
        return group, False

    def _end(self) -> None:
        self._queue.put(None)
        self._thread.join(self._wait_s)
        if self._thread.is_alive():
            raise unavailable("the disk does not answer", cause="ETIMEDOUT")


def _deliver(group: Sequence[StorageTask]) -> None:
    """Completes all futures of the group at once: waking another thread costs as much as a small piece of work."""

    def deliver() -> None:
        for work in group:
            work.deliver()

    with contextlib.suppress(RuntimeError):  # a loop that is closed awaits nothing any more
        group[0].outcome.get_loop().call_soon_threadsafe(deliver)
