"""Deadlines: the moment until which a call may wait."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A moment of time.monotonic(). One deadline may cover several calls."""

    at: float
    """Seconds of time.monotonic(). It is finite, because every wait ends."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.at):
            raise ValueError(f"a deadline is a finite moment, not {self.at}")

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline `seconds` from now; 0 does not wait at all."""
        return cls(at=time.monotonic() + seconds)

    def left_s(self) -> float:
        """Return the seconds that are left, never below 0."""
        return max(self.at - time.monotonic(), 0.0)

    def sooner(self, seconds: float) -> Deadline:
        """Return this deadline, or the one `seconds` from now if that is earlier."""
        return Deadline(at=min(self.at, time.monotonic() + seconds))
