"""Whether a child that missed its deadline worked, or stood still: stopped, or on a machine busy with others."""

from __future__ import annotations

import psutil

# Of a deadline, spent as processor time: with less, it was not the work that took so long.
_BUSY_SHARE = 0.5


class CpuTime:
    """Of one process, from when this is made."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began_s = self._now_s()

    def spent_s(self) -> float:
        """Processor seconds since then; 0 of a process that is gone."""
        return max(0.0, self._now_s() - self._began_s)

    def stood_still(self, deadline_s: float) -> bool:
        """Whether it was doing something else, or nothing, for most of so many seconds."""
        return self.spent_s() < _BUSY_SHARE * deadline_s

    def _now_s(self) -> float:
        try:
            used = psutil.Process(self._pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(used.user + used.system)
