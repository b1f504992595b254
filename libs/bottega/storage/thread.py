"""One thread that does blocking work in the order in which it came, for an event loop that only awaits.

What only such a thread touches needs no lock. It knows nothing of the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from bottega.storage.faults import unavailable

ResultT = TypeVar("ResultT")

# Of a disk that hangs; a healthy one takes milliseconds.
_WAIT_S = 30.0
# More than a service has calls at once: beyond it the disk is the bottleneck, and callers should hear so.
_MAX_WAITING = 1024

_Work = tuple["Future[Any]", Callable[[], Any]]


class StorageThread:
    """Starts with the first work; close it when it is no longer needed.

    max_waiting: pieces of work that may wait. wait_s: seconds until the caller of one that has not ended gives up.
    """

    def __init__(self, name: str, *, max_waiting: int = _MAX_WAITING, wait_s: float = _WAIT_S) -> None:
        self._queue: queue.Queue[_Work | None] = queue.Queue(max_waiting)
        # A daemon, because nothing else lets a process end while its disk hangs.
        self._thread = threading.Thread(target=self._do_all, name=name, daemon=True)
        self._wait_s = wait_s
        self._started = self._closed = False

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """What `work` returns or raises.

        Raises StorageUnavailable when too much waits already, when it takes too long, and after close(). Then, and
        when the caller is cancelled, work that has begun goes on to its end, and other work is dropped.
        """
        future = self._enqueue(work)
        try:
            async with asyncio.timeout(self._wait_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise unavailable("the disk does not answer", cause="ETIMEDOUT") from None

    async def close(self) -> None:
        """Ends the thread after the work that waits. Raises StorageUnavailable when that takes too long."""
        if self._started and not self._closed:
            self._closed = True
            await asyncio.to_thread(self._end)

    def _enqueue(self, work: Callable[[], ResultT]) -> Future[ResultT]:
        if self._closed:
            raise unavailable("the storage is closed", cause="ESHUTDOWN")
        if not self._started:
            self._started = True
            self._thread.start()
        future: Future[ResultT] = Future()
        try:
            self._queue.put_nowait((future, work))
        except queue.Full:
            raise unavailable("more waits for the disk than it can take", cause="EAGAIN") from None
        return future

    def _do_all(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            del item  # what the work holds goes with it
            if future.set_running_or_notify_cancel():
                _do(future, work)
            del future, work
            if self._closed and self._queue.empty():
                return

    def _end(self) -> None:
        with contextlib.suppress(queue.Full):  # then the thread is not idle, and sees by itself that it should end
            self._queue.put(None, timeout=self._wait_s)
        self._thread.join(self._wait_s)
        if self._thread.is_alive():
            raise unavailable("the disk does not answer", cause="ETIMEDOUT")


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - it is raised where the work is awaited
        future.set_exception(error)
    else:
        future.set_result(result)
