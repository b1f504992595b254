"""The two clocks of a service as one value that tests can turn, and clocks to judge others by: one that nobody can set,
and one that stands still while this process does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# A look that comes so many times later than it was to says that this process was stopped, and not just busy.
_LATE = 2.0


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the name of the machine's last start, since which the monotonic clock counts; empty if it has none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """monotonic: for spans and deadlines, in seconds. wall: Unix time in seconds, for people. boot: see boot_id."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    boot: Callable[[], str] = boot_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMark:
    """What a later process needs to go on with a steady clock."""

    boot: str
    """Start of the machine, see boot_id."""
    ahead_s: float
    """By how much the steady clock is ahead of the monotonic one, in seconds."""
    steady: float
    """What the steady clock said when the mark was made, in seconds."""


class SteadyClock:
    """Unix time that goes on evenly, whatever the machine's clock is set to meanwhile: for how old something is.

    It begins at what the clock on the wall says, or goes on where an earlier process was (`resume`).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_s = clock.wall() - clock.monotonic()

    def __call__(self) -> float:
        """The time now. It never goes back."""
        return self._clock.monotonic() + self._ahead_s

    def go_on_from(self, steady: float) -> None:
        """Go on from a moment of an earlier process, as if nothing had passed since, unless it is later already."""
        self._ahead_s = max(self._ahead_s, steady - self._clock.monotonic())

    def mark(self) -> ClockMark:
        """Return what a later process needs to go on."""
        return ClockMark(boot=self._clock.boot(), ahead_s=self._ahead_s, steady=self())

    def resume(self, mark: ClockMark) -> None:
        """Go on from what an earlier process has left.

        The monotonic clock says what has passed since. It begins anew with the machine: then nothing has passed,
        because the machine's clock may have been set to anything meanwhile.
        """
        if mark.boot and mark.boot == self._clock.boot():
            self._ahead_s = max(mark.ahead_s, mark.steady - self._clock.monotonic())
        else:
            self._ahead_s = mark.steady - self._clock.monotonic()


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
