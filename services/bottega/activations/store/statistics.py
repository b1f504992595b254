"""The statistics of a store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DropReason(StrEnum):
    """The reasons for which a section, or the end of a recording, is dropped."""

    BUSY = "busy"
    """Too many sections wait to be written."""
    TROUBLE = "trouble"
    """The disk is full or fails, or memory is short."""
    NO_ROOM = "no_room"
    """All of the budget is used by pinned templates."""
    TOO_LARGE = "too_large"
    """Its template would exceed the budget of one template, or the size of an answer."""
    NOT_GRANTED = "not_granted"
    """Another worker records or has recorded the template, or the recording is unknown."""
    EARLY = "early"
    """Its recording is still being written. The worker may send the section again later, to replace the old one."""
    ABANDONED = "abandoned"
    """The worker has abandoned the recording, or its connection was lost."""
    UNFIT = "unfit"
    """The section does not fit the rest of its recording, or the recording has no sections."""


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
    """Number of questions whose template was recorded."""
    misses: int
    fetches: dict[str, int]
    """Number of sections given to workers, by source: "memory", "loaded" (into memory) or "disk" (memory full)."""
    loads: int
    """Number of files loaded into memory. `load_s` and `loaded_bytes` are the total time and size."""
    load_s: float
    loaded_bytes: int
    disk_bytes_per_s: float
    recorded: int
    """Number of templates that were recorded."""
    recorded_sections: int
    """Number of sections that were recorded, including replacements."""
    dropped: dict[str, int]
    """Number of dropped sections and recordings, by `DropReason`."""
    evictions: int
    """Number of templates that were evicted from disk."""
    memory_evictions: int
    """Number of files that were evicted from memory."""
    damaged: int
    """Number of damaged files that were deleted."""
    recording: int
    """Number of recordings in progress."""
    waiting: int
    """Number of sections that wait to be written."""
    waiting_bytes: int
    trouble: str
    """Why nothing can be recorded now; "" if it can."""
