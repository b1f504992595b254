"""Clocks: a service's clocks, which tests can fake; one that never jumps, one that hosts share, and one that stops."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# A read that comes this late, or one more interval late, means that the process was stopped, and not just busy.
_LATE_S = 1.0
# A database that answers slowly moves its clock by less, and a jump by less matters to nobody.
_JUMP_S = 30.0
_MAX_JUMPS = 256
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the ID of the machine's boot, from which the monotonic clock counts; empty if it is unknown."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The clocks that a service uses."""

    monotonic: Callable[[], float] = time.monotonic
    """Seconds, for durations and deadlines."""
    wall: Callable[[], float] = time.time
    """Unix time in seconds, for display."""
    boot: Callable[[], str] = boot_id
    """Returns the ID of the machine's boot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMark:
    """A stored state of a SteadyClock, from which a later process continues."""

    boot: str
    """ID of the machine's boot."""
    ahead_s: float
    """Seconds by which the steady clock is ahead of the monotonic one."""
    steady: float
    """Time of the steady clock, in seconds, when the mark was made."""

    @classmethod
    def read(cls, path: Path) -> ClockMark | None:
        """Return the mark in a file; None if there is no file, or its content is invalid."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            mark = cls(boot=str(content["boot"]), ahead_s=float(content["ahead_s"]), steady=float(content["steady"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return mark if math.isfinite(mark.ahead_s) and math.isfinite(mark.steady) else None

    def write(self, path: Path) -> None:
        """Write the mark to a file. If the disk cannot be written, the old file stays."""
        temporary = path.with_name(f"{path.name}.new")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
            temporary.replace(path)


class SteadyClock:
    """A clock of Unix time that never jumps, even if the machine's clock is set. Use it to measure ages.

    It starts at the wall clock's time, or continues the clock of an earlier process (`resume`).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_s = clock.wall() - clock.monotonic()

    def __call__(self) -> float:
        """Return the current time, which never goes back."""
        return self._clock.monotonic() + self._ahead_s

    def go_on_from(self, steady: float) -> None:
        """Continue from a time of an earlier process, unless this clock is already ahead of it."""
        self._ahead_s = max(self._ahead_s, steady - self._clock.monotonic())

    def mark(self) -> ClockMark:
        """Return the state from which a later process continues."""
        return ClockMark(boot=self._clock.boot(), ahead_s=self._ahead_s, steady=self())

    def resume(self, mark: ClockMark) -> None:
        """Continue the clock of an earlier process.

        The monotonic clock measures the time since the mark. After a reboot, that clock has restarted and the wall
        clock may have been set, so no time counts as passed.
        """
        if mark.boot and mark.boot == self._clock.boot():
            self._ahead_s = max(mark.ahead_s, mark.steady - self._clock.monotonic())
        else:
            self._ahead_s = mark.steady - self._clock.monotonic()


class SharedClock:
    """A clock of Unix time that follows the clock of a database, so that all hosts agree, and never goes back.

    Until it is set, it shows this machine's time.
    """

    def __init__(
        self, *, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._monotonic = monotonic
        self._ahead_s = wall() - monotonic()
        self._is_set = False
        self._latest = 0.0
        self._jumps: deque[tuple[float, float]] = deque(maxlen=_MAX_JUMPS)

    def __call__(self) -> float:
        """Return the current time in seconds."""
        self._latest = max(self._latest, self._monotonic() + self._ahead_s)
        return self._latest

    def set(self, database_time: float, *, began: float) -> None:
        """Follow the database.

        Args:
            database_time: What its clock showed, in seconds.
            began: Time on the monotonic clock when it was asked. The answer is taken as from half the way until now.
        """
        before_s, self._ahead_s = self._ahead_s, database_time - (began + self._monotonic()) / 2
        if not self._is_set:  # nobody has used this machine's time for a job
            self._is_set, self._latest = True, 0.0
        elif self._ahead_s - before_s > _JUMP_S:
            self._jumps.append((self._monotonic(), self._ahead_s - before_s))

    def jumped_s(self, within_s: float) -> float:
        """Return by how many seconds the clock was set ahead during the last `within_s` seconds.

        The database's clock may have been set, or another server with another clock may be the database now.
        """
        since = self._monotonic() - within_s
        return sum(seconds for at, seconds in self._jumps if at > since)


def seconds_until_tick(
    period_s: float, *, least_share: float = 0.5, monotonic: Callable[[], float] = time.monotonic
) -> float:
    """Return the seconds until the monotonic clock's next multiple of a period.

    If less than `least_share` of the period is left until then, it is the multiple after that.

    Timers of one process that use it expire together, so that an idle process is woken once for all of them: waking up
    costs more than what most of them do.
    """
    now = monotonic()
    left_s = period_s - now % period_s
    return left_s if left_s >= least_share * period_s else left_s + period_s


class AwakeClock:
    """A clock that only counts while this process is running, to tell whether a peer was silent for too long.

    While the process is stopped (SIGSTOP, a suspended machine, a blocked event loop) it cannot receive what peers send,
    so such a period counts as one interval. It has one reader.

    Args:
        every_s: Longest interval between two reads; a small part of the silence to be measured.
    """

    def __init__(self, every_s: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.every_s = every_s
        self._monotonic = monotonic
        self._read_at = monotonic()
        self._seconds = 0.0

    def __call__(self) -> float:
        """Return the seconds counted so far."""
        now = self._monotonic()
        passed_s, self._read_at = now - self._read_at, now
        self._seconds += passed_s if passed_s <= self.every_s + min(self.every_s, _LATE_S) else self.every_s
        return self._seconds
