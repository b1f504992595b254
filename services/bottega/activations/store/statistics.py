"""What a store counts, and its figures of a moment."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class DropReason(StrEnum):
    """Why a section, or what ends a recording, was not kept."""

    BUSY = "busy"
    """More waits to be written than may."""
    TROUBLE = "trouble"
    """The disk is full, or fails; or there is no memory to take it in."""
    NO_ROOM = "no_room"
    """What is pinned leaves it no room within the budget."""
    TOO_LARGE = "too_large"
    """Its template would be over the budget of one, or over the bounds of an answer."""
    NOT_GRANTED = "not_granted"
    """Another worker records the template, or has recorded it; or the recording is unknown."""
    EARLY = "early"
    """Its recording is complete, and still being written: what is sent again later takes its place."""
    ABANDONED = "abandoned"
    """The worker has given its recording up, or is gone."""
    UNFIT = "unfit"
    """It does not fit to the rest of its recording, or there is nothing to complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStatistics:
    """A store at one moment. Counts are since the start.

    hits, misses: questions, by whether the template was recorded. fetches: sections that workers had, by where they
    were: "memory", "loaded" (read from the disk for this) or "disk" (memory had no room). loads, load_s, loaded_bytes:
    of files into memory. recorded: templates; recorded_sections: also those that took the place of others. dropped:
    sections and recordings, by DropReason. evictions: templates, from the disk; memory_evictions: files, from memory.
    damaged: files that were found to be, and forgotten. recording: templates that are being recorded. waiting,
    waiting_bytes: sections that are to be written. trouble: why nothing can be recorded now; empty when all is well.
    """

    templates: int
    sections: int
    pinned: int
    disk_bytes: int
    disk_budget_bytes: int
    memory_bytes: int
    memory_budget_bytes: int
    template_budget_bytes: int
    hits: int
    misses: int
    fetches: dict[str, int]
    loads: int
    load_s: float
    loaded_bytes: int
    disk_bytes_per_s: float
    recorded: int
    recorded_sections: int
    dropped: dict[str, int]
    evictions: int
    memory_evictions: int
    damaged: int
    recording: int
    waiting: int
    waiting_bytes: int
    trouble: str


class ActivationCounts:
    """Since the start. Any thread counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter({reason.value: 0 for reason in DropReason})

    def add(self, name: str, number: int = 1) -> None:
        """Of one of the counts of ActivationStatistics."""
        with self._lock:
            self._totals[name] += number

    def total(self, name: str) -> int:
        """Of `add`."""
        return self._totals[name]

    def drop(self, reason: DropReason, number: int = 1) -> None:
        """Something was dropped."""
        with self._lock:
            self._dropped[reason.value] += number

    def dropped(self) -> dict[str, int]:
        """By reason."""
        with self._lock:
            return dict(self._dropped)
