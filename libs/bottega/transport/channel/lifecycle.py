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
    """Whether a link is open, and what ended it."""

    def __init__(self, ends: Sequence[BackendEnd], counters: LinkCounters) -> None:
        self._ends = ends
        self._counters = counters
        self._lock = threading.Lock()
        self.cause: LinkError | None = None  # what it died of, or None while it lives
        self._died_at = 0.0

    def check(self) -> None:
        """Raises what the link died of, if it did."""
        if self.cause is not None:
            raise _copy(self.cause)

    def end(self, cause: LinkError) -> None:
        """Ends the link; every call that waits on it wakes up. The first cause counts."""
        with self._lock:
            if self.cause is not None:
                return
            self._died_at = time.monotonic()
            self.cause = cause
        self._counters.died(type(cause).__name__)
        for end in self._ends:
            end.shut_down(cause)

    def fail(self, error: LinkError) -> NoReturn:
        """Ends the link with this error, and raises what it died of: that may have been something else before."""
        self.end(error)
        assert self.cause is not None
        raise _copy(self.cause) from error

    def dead_for_s(self) -> float:
        """Seconds since it died; 0 while it lives."""
        return time.monotonic() - self._died_at if self.cause is not None else 0.0


def _copy(cause: LinkError) -> LinkError:
    """Tracebacks of several threads would grow into one if they raised the same object."""
    return type(cause)(cause.message, metadata=cause.metadata)
