"""One thread that does blocking work in the order in which it came, for an event loop that only awaits.

What only such a thread touches needs no lock. It knows nothing of the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bottega.storage.faults import BUSY, unavailable

ResultT = TypeVar("ResultT")

# Of a disk that hangs; a healthy one takes milliseconds.
_WAIT_S = 30.0
# More than a service has calls at once: beyond it the disk is the bottleneck, and callers should hear so.
_MAX_WAITING = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Something to do, and where its outcome goes. size_bytes: about what it writes."""

    do: Callable[[], Any]
    size_bytes: int = 0
    outcome: Future[Any] = field(default_factory=Future)

    def begin(self) -> bool:
        """Whether somebody still waits for it. Ask once, before doing it."""
        return self.outcome.set_running_or_notify_cancel()


def one_by_one(group: Sequence[Work]) -> None:
    """Does each piece of work by itself."""
    for work in group:
        if work.begin():
            try:
                work.outcome.set_result(work.do())
            except BaseException as error:  # noqa: BLE001 - it is raised where the work is awaited
                work.outcome.set_exception(error)


class StorageThread:
    """Starts with the first work; close it when it is no longer needed.

    serve: does a group of work and sets every outcome. max_group, max_group_bytes: a group is what waits, up to so
    much of it. max_waiting: pieces of work that may wait. wait_s: seconds until the caller of one that has not ended
    gives up.
    """

    def __init__(
        self,
        name: str,
        *,
        serve: Callable[[Sequence[Work]], None] = one_by_one,
        max_group: int = 1,
        max_group_bytes: int = 1,
        max_waiting: int = _MAX_WAITING,
        wait_s: float = _WAIT_S,
    ) -> None:
        self._serve = serve
        self._max_group = max_group
        self._max_group_bytes = max_group_bytes
        self._queue: queue.Queue[Work | None] = queue.Queue(max_waiting)
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
        work = Work(do=do, size_bytes=size_bytes)
        self._enqueue(work)
        future: asyncio.Future[ResultT] = asyncio.wrap_future(work.outcome)
        try:
            async with asyncio.timeout(self._wait_s):
                return await future
        except TimeoutError:
            raise unavailable("the disk does not answer", cause="ETIMEDOUT") from None

    async def close(self) -> None:
        """Ends the thread after the work that waits. Raises StorageUnavailable when that takes too long."""
        if self._started and not self._closed:
            self._closed = True
            await asyncio.to_thread(self._end)

    def _enqueue(self, work: Work) -> None:
        if self._closed:
            raise unavailable("the storage is closed", cause="ESHUTDOWN")
        if not self._started:
            self._started = True
            self._thread.start()
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            raise unavailable("more waits for the disk than it can take", cause=BUSY) from None

    def _serve_all(self) -> None:
        while (first := self._queue.get()) is not None:
            group, ended = self._group(first)
            del first
            self._serve(group)
            del group  # what the work holds goes with it
            if ended or (self._closed and self._queue.empty()):
                return

    def _group(self, first: Work) -> tuple[list[Work], bool]:
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
        with contextlib.suppress(queue.Full):  # then the thread is not idle, and sees by itself that it should end
            self._queue.put(None, timeout=self._wait_s)
        self._thread.join(self._wait_s)
        if self._thread.is_alive():
            raise unavailable("the disk does not answer", cause="ETIMEDOUT")
