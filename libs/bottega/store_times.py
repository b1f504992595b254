"""The seconds that a store spent on the parts of a request; see StoreTimes of the contract."""

from __future__ import annotations

import time

from bottega.v1.trace_pb2 import StoreTimes

# A day: no caller waits so long.
_MOST_S = 86_400.0


class LapTimer:
    """A stopwatch for parts that follow one another."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def lap(self) -> float:
        """Return the seconds since the last lap, or since the beginning."""
        last_s, self._last_s = self._last_s, time.monotonic()
        return self._last_s - last_s


def check_times(times: StoreTimes) -> StoreTimes:
    """Return a store's times. Raise ValueError if they are impossible."""
    # Written so that NaN breaks the rule.
    if not all(0.0 <= seconds <= _MOST_S for _, seconds in times.ListFields()):
        raise ValueError(f"a store reported times of its work that are not 0 to {_MOST_S:g} s")
    return times
