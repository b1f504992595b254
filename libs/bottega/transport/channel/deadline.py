"""Until when a call may wait."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A moment of time.monotonic(); one deadline may cover several calls.

    at: seconds. Finite, because every wait ends.
    """

    at: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.at):
            raise ValueError(f"a deadline is a finite moment, not {self.at}")

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The moment `seconds` from now. 0 does not wait at all."""
        return cls(at=time.monotonic() + seconds)

    def left_s(self) -> float:
        """Seconds until then, never below 0."""
        return max(self.at - time.monotonic(), 0.0)

    def sooner(self, seconds: float) -> Deadline:
        """This, or the moment `seconds` from now if that is earlier."""
        return Deadline(at=min(self.at, time.monotonic() + seconds))
