"""What a store has spent on a request, in parts, as its answer says it: see StoreTimes of the contract."""

from __future__ import annotations

import time

from bottega.v1.trace_pb2 import StoreTimes

# Whoever has asked does not wait for a day.
_MOST_S = 86_400.0


class LapTimer:
    """Measures parts that follow one another."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def lap(self) -> float:
        """Seconds since it was made, or since the lap before."""
        last_s, self._last_s = self._last_s, time.monotonic()
        return self._last_s - last_s


def check_times(times: StoreTimes) -> StoreTimes:
    """What a store has said, where it can be. Raises ValueError where it cannot."""
    # Written so that NaN breaks the rule.
    if not all(0.0 <= seconds <= _MOST_S for _, seconds in times.ListFields()):
        raise ValueError(f"a store has spent {_MOST_S:g} s on a part of its work at most, and no less than nothing")
    return times
