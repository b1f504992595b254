"""Timing of the parts of a request in a store; see StoreTimes in the contract."""

from __future__ import annotations

import time

from bottega.v1.trace_pb2 import StoreTimes

# A day: no caller waits so long.
_MOST_S = 86_400.0


class LapTimer:
    """A stopwatch for parts that follow each other."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def lap(self) -> float:
        """Return the seconds since the last call, or since the timer was made."""
        last_s, self._last_s = self._last_s, time.monotonic()
        return self._last_s - last_s


def check_times(times: StoreTimes) -> StoreTimes:
    """Return a store's times unchanged. Raise ValueError if they are impossible."""
    # Written so that NaN breaks the rule.
    if not all(0.0 <= seconds <= _MOST_S for _, seconds in times.ListFields()):
        raise ValueError(f"a store reported times of its work that are not 0 to {_MOST_S:g} s")
    return times
