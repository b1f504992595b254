"""Tells whether a child that missed its deadline was working, or was stopped or starved by other processes."""

from __future__ import annotations

import psutil

# A child that spent less than this share of the deadline as processor time was not slow because of its work.
_BUSY_SHARE = 0.5


class CpuTime:
    """Processor time of one process, from when this object is made."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began_s = self._now_s()

    def spent_s(self) -> float:
        """Return the processor seconds spent since then; 0 if the process is gone."""
        return max(0.0, self._now_s() - self._began_s)

    def stood_still(self, deadline_s: float) -> bool:
        """Return whether the process hardly ran during the last `deadline_s` seconds."""
        return self.spent_s() < _BUSY_SHARE * deadline_s

    def _now_s(self) -> float:
        try:
            used = psutil.Process(self._pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(used.user + used.system)
