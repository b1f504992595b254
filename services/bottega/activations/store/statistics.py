"""The statistics of a store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DropReason(StrEnum):
    """The reason why a section, or the end of a recording, was dropped."""

    BUSY = "busy"
    """Too much is waiting to be written."""
    TROUBLE = "trouble"
    """The disk is full or fails, or memory is short."""
    NO_ROOM = "no_room"
    """Pinned templates leave no room within the budget."""
    TOO_LARGE = "too_large"
    """Its template would exceed the budget of one template, or the size of an answer."""
    NOT_GRANTED = "not_granted"
    """Another worker records or has recorded the template, or the recording is unknown."""
    EARLY = "early"
    """Its recording is complete and still being written. A section that is sent again later replaces the old one."""
    ABANDONED = "abandoned"
    """The worker has abandoned its recording, or its link was lost."""
    UNFIT = "unfit"
    """It does not fit the rest of its recording, or the recording has no sections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStatistics:
    """A snapshot of a store's state. Counts are since the start."""

    templates: int
    sections: int
    pinned: int
    disk_bytes: int
    disk_budget_bytes: int
    memory_bytes: int
    memory_budget_bytes: int
    template_budget_bytes: int
    hits: int
    """Queries whose template was recorded."""
    misses: int
    fetches: dict[str, int]
    """Sections given to workers, by where they were: "memory", "loaded" (from disk for this) or "disk" (no room in
    memory).
    """
    loads: int
    """Files loaded into memory, as in `load_s` and `loaded_bytes`."""
    load_s: float
    loaded_bytes: int
    disk_bytes_per_s: float
    recorded: int
    """Number of recorded templates."""
    recorded_sections: int
    """Number of recorded sections, including replacements."""
    dropped: dict[str, int]
    """Sections and recordings, by `DropReason`."""
    evictions: int
    """Number of templates evicted from disk."""
    memory_evictions: int
    """Number of files evicted from memory."""
    damaged: int
    """Damaged files that were dropped."""
    recording: int
    """Recordings in progress."""
    waiting: int
    """Sections that wait to be written."""
    waiting_bytes: int
    trouble: str
    """Why nothing can be recorded now; empty if it can."""
