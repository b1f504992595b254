"""A low-priority thread for slow work whose result nobody waits for, one piece after another."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_log = logging.getLogger(__name__)

# A nice value: threads that answer requests come first on the same core. It is not higher, because this thread must
# still make progress on a busy machine while it holds a lock.
_NICENESS = 5


class BackgroundThread:
    """A low-priority thread. Close it. Its callers bound how much work waits.

    Args:
        name: Name of the work in the log, if it fails.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(1, name, initializer=_make_way)
        self._lock = threading.Lock()
        self._closed = False

    def start(self, work: Callable[[], None]) -> None:
        """Queue work after what was queued before. After `close` it does nothing."""
        with self._lock:
            if not self._closed:
                self._executor.submit(work).add_done_callback(self._log_failure)

    def close(self) -> None:
        """Drop waiting work and wait for the running piece. It may be called again."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(cancel_futures=True)

    def _log_failure(self, done: Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("work in the background failed", extra={"task": self._name}, exc_info=error)


def _make_way() -> None:
    """Lower the priority of the calling thread, and of those that it starts."""
    if sys.platform == "linux":  # elsewhere, threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
