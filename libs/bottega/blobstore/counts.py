"""The counters of a store since its start."""

from __future__ import annotations

import threading
from collections import Counter
from enum import StrEnum
from typing import Generic, TypeVar

ReasonT = TypeVar("ReasonT", bound=StrEnum)


class StoreCounts(Generic[ReasonT]):
    """Thread-safe counters: totals by name, and dropped items by reason.

    Args:
        reasons: The reasons for dropping an item; each count starts at 0.
    """

    def __init__(self, reasons: type[ReasonT]) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter({reason.value: 0 for reason in reasons})

    def add(self, name: str, number: int = 1) -> None:
        """Increase a total."""
        with self._lock:
            self._totals[name] += number

    def total(self, name: str) -> int:
        """Return a total; 0 if nothing was counted."""
        return self._totals[name]

    def drop(self, reason: ReasonT, number: int = 1) -> None:
        """Count dropped items."""
        with self._lock:
            self._dropped[reason.value] += number

    def dropped(self) -> dict[str, int]:
        """Return the numbers of dropped items, by reason."""
        with self._lock:
            return dict(self._dropped)
