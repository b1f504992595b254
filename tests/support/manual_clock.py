"""A clock for what takes its time from one: it goes when it is told to."""

from __future__ import annotations


class ManualClock:
    """now_s: what it says."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
