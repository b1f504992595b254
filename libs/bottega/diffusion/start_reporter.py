"""Says how far an engine's start is: which stage it is in, and how many bytes of it are done."""

from __future__ import annotations

import time
from collections.abc import Callable

# Between two words on the same stage: often enough to be a sign of life, seldom enough to cost nothing.
_INTERVAL_S = 0.5

SendProgress = Callable[[str, int, int], None]
"""Called with a stage, the bytes of it that are done, and all of them; 0 where there are none to count."""


class StartReporter:
    """Reports the stages of a start.

    Args:
        send: Told of each stage as it begins and, from time to time, of how far it is.
        clock: Monotonic.
    """

    def __init__(self, send: SendProgress, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._stage = ""
        self._done_bytes = 0
        self._total_bytes = 0
        self._sent_s = 0.0

    def begin(self, stage: str, total_bytes: int = 0) -> None:
        """Report that a stage begins."""
        self._stage, self._done_bytes, self._total_bytes = stage, 0, total_bytes
        self._report()

    def advance(self, size_bytes: int = 0) -> None:
        """Report that the stage has got further, by so many bytes."""
        self._done_bytes += size_bytes
        if self._clock() - self._sent_s >= _INTERVAL_S:
            self._report()

    def _report(self) -> None:
        self._sent_s = self._clock()
        self._send(self._stage, self._done_bytes, self._total_bytes)


def silent_reporter() -> StartReporter:
    """Return a reporter that tells nobody."""
    return StartReporter(lambda *_: None)
