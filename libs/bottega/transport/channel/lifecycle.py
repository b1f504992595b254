"""The life of a link: it ends once, for one cause, at both ends of both directions together."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from bottega.errors import LinkError
from bottega.transport.channel.backend import BackendEnd
from bottega.transport.channel.counters import LinkCounters


class Lifecycle:
    """State of a link: open, or ended by a cause."""

    def __init__(self, ends: Sequence[BackendEnd], counters: LinkCounters) -> None:
        self._ends = ends
        self._counters = counters
        self._lock = threading.Lock()
        self.cause: LinkError | None = None  # None while the link is open
        self._died_at = 0.0

    def check(self) -> None:
        """Raise the cause if the link has ended."""
        if self.cause is not None:
            raise _copy(self.cause)

    def end(self, cause: LinkError) -> None:
        """End the link and wake every call that waits on it. Only the first cause counts."""
        with self._lock:
            if self.cause is not None:
                return
            self._died_at = time.monotonic()
            self.cause = cause
        self._counters.died(type(cause).__name__)
        for end in self._ends:
            end.shut_down(cause)

    def fail(self, error: LinkError) -> NoReturn:
        """End the link with this error, and raise its cause, which may be an earlier error."""
        self.end(error)
        assert self.cause is not None
        raise _copy(self.cause) from error

    def dead_for_s(self) -> float:
        """Return the seconds since the link ended; 0 while it is open."""
        return time.monotonic() - self._died_at if self.cause is not None else 0.0


def _copy(cause: LinkError) -> LinkError:
    """Return a copy: if several threads raised the same object, their tracebacks would grow into one."""
    return type(cause)(cause.message, metadata=cause.metadata)
