"""The two clocks of a service as one value that tests can turn, and clocks to judge others by: one that nobody can set,
and one that stands still while this process does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

# A look that comes so many times later than it was to says that this process was stopped, and not just busy.
_LATE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """monotonic: for spans and deadlines, in seconds. wall: Unix time in seconds, for people."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class SteadyClock:
    """Unix time that goes on evenly, whatever the machine's clock is set to meanwhile: for how old something is.

    It begins at what the clock on the wall says, or where an earlier process was (`go_on_from`).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_s = clock.wall() - clock.monotonic()

    def __call__(self) -> float:
        """The time now. It never goes back."""
        return self._clock.monotonic() + self._ahead_s

    def go_on_from(self, steady: float, *, wall: float) -> None:
        """Goes on from a moment of an earlier process, when the two clocks said this.

        What has passed since is what the machine's clock says, and nothing where that was set back.
        """
        self._ahead_s = steady + max(0.0, self._clock.wall() - wall) - self._clock.monotonic()


class AwakeClock:
    """Seconds in which this process was awake: a clock by which to decide that a peer has been silent for too long.

    While the process itself is stopped (SIGSTOP, a suspended machine, a blocked event loop) it cannot receive what
    peers send, so such a time counts as one interval. One reader at a time.

    every_s: the longest interval between two reads; a small part of the silence that is measured by it.
    """

    def __init__(self, every_s: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.every_s = every_s
        self._monotonic = monotonic
        self._read_at = monotonic()
        self._seconds = 0.0

    def __call__(self) -> float:
        """Seconds so far."""
        now = self._monotonic()
        passed_s, self._read_at = now - self._read_at, now
        self._seconds += passed_s if passed_s <= _LATE * self.every_s else self.every_s
        return self._seconds
