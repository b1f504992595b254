"""Reports the progress of an engine's start: its stage, and how many bytes of the stage are processed."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds between two reports of a stage: often enough as a sign of life, and rare enough to cost nothing.
_INTERVAL_S = 0.5

SendProgress = Callable[[str, int, int], None]
"""Called with a stage, its processed bytes and its total bytes; both are 0 if the stage does not count bytes."""


class StartReporter:
    """Reports the stages of a start.

    Args:
        send: Called at the start of each stage, and now and then with its progress.
        clock: Returns monotonic seconds.
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
        """Report that another `size_bytes` of the stage are processed."""
        self._done_bytes += size_bytes
        if self._clock() - self._sent_s >= _INTERVAL_S:
            self._report()

    def _report(self) -> None:
        self._sent_s = self._clock()
        self._send(self._stage, self._done_bytes, self._total_bytes)


def silent_reporter() -> StartReporter:
    """Return a reporter that sends nothing."""
    return StartReporter(lambda *_: None)
