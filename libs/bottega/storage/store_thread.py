"""The thread in which a store writes: one thing after the other, in the order in which it came."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from bottega.storage.os_errors import unavailable

ResultT = TypeVar("ResultT")

# Of a disk that hangs; a healthy one takes milliseconds.
_WAIT_S = 30.0

_log = logging.getLogger(__name__)


class StoreThread:
    """tick: called in the thread every `every_s` seconds, between whatever else it does.

    Whoever posts bounds what waits: the thread does not.
    """

    def __init__(self, name: str, *, tick: Callable[[], None], every_s: float) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tick = tick
        self._every_s = every_s
        # A daemon, because nothing else lets a process end while its disk hangs.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """Has it done soon. What it raises is logged."""
        self._queue.put(work)

    def call(self, do: Callable[[], ResultT], *, wait_s: float = _WAIT_S) -> ResultT:
        """What `do` returns or raises, when all that was posted before is done.

        Raises StorageUnavailable when that takes too long, or the thread has ended; it may be done all the same then.
        """
        if not self._thread.is_alive():
            raise unavailable("the storage is closed", cause="ESHUTDOWN")
        outcome: Future[ResultT] = Future()
        self.post(lambda: _settle(outcome, do))
        try:
            return outcome.result(wait_s)
        except FutureTimeoutError:
            outcome.cancel()
            raise unavailable("the disk does not answer", cause="ETIMEDOUT") from None

    def end(self, *, wait_s: float = _WAIT_S) -> bool:
        """Ends it after what was posted; whether it has, in that time. Harmless where it never began."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due_s = time.monotonic() + self._every_s
        while (work := self._next(due_s)) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever it is, later work must be done
                _log.error("what a store's thread did failed", exc_info=error)
            if work is self._tick:
                due_s = time.monotonic() + self._every_s
            del work  # what it holds goes with it

    def _next(self, due_s: float) -> Callable[[], None] | None:
        """The tick once it is due, however much waits; else what was posted. None is the end."""
        left_s = due_s - time.monotonic()
        try:
            return self._queue.get(timeout=left_s) if left_s > 0.0 else self._tick
        except queue.Empty:
            return self._tick


def _settle(outcome: Future[ResultT], do: Callable[[], ResultT]) -> None:
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        outcome.set_result(do())
    except BaseException as error:  # noqa: BLE001 - it is raised where the outcome is awaited
        outcome.set_exception(error)
