"""A thread for work that takes long and that nobody waits for: one piece after the other, behind all other threads."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_log = logging.getLogger(__name__)

# On the scale of nice: threads that answer somebody come first on the same core. Not more: where others have all cores,
# this thread, too, has to go on soon when it holds a lock.
_NICENESS = 5


class BackgroundThread:
    """name: of what it does, for the log, where that fails. Close it. Its callers bound what waits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(1, name, initializer=_make_way)
        self._lock = threading.Lock()
        self._closed = False

    def start(self, work: Callable[[], None]) -> None:
        """Has it done after what was handed over before. After `close`, nothing is done."""
        with self._lock:
            if not self._closed:
                self._executor.submit(work).add_done_callback(self._log_failure)

    def close(self) -> None:
        """Returns when what is being done has ended; what waits is dropped. May be called again."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(cancel_futures=True)

    def _log_failure(self, done: Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("work in the background failed", extra={"task": self._name}, exc_info=error)


def _make_way() -> None:
    """Has other threads come before the calling one, and before those that it starts."""
    if sys.platform == "linux":  # elsewhere, threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
