"""The settings and the statistics of an activation store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStoreSettings:
    """The settings of an ActivationStore."""

    folder: Path
    """Folder of database, sections and profiles. Only one process at a time may use it."""
    disk_budget_bytes: int
    """Upper bound on the bytes of all templates' files. The disk may have less space."""
    memory_budget_bytes: int
    """Upper bound on the bytes of files in memory, which workers on this host map. Sections that wait do not count."""
    template_budget_bytes: int = 0
    """Upper bound on the bytes of one template; 0 means no bound."""
    min_free_bytes: int = 0
    """Bytes of disk space that stay free for other programs. At most 5 % of the disk counts."""
    shared_budget_bytes: int = 1 << 40
    """Upper bound on the bytes of all recordings in the object store, of all activation stores."""
    shared_address: str = ""
    """Address of the object store. When it changes, recordings are written to the new one."""
    max_templates: int = 10_000
    max_loads: int = 2
    """Number of parallel loads into memory."""
    max_waiting_bytes: int = 512 << 20
    """Upper bound on the bytes of sections that wait to be written. A larger section is accepted if no other waits."""
    record_idle_s: float = 120.0
    """Seconds without a message after which a recording is abandoned."""
    retry_s: float = 5.0
    """Seconds between attempts to use a failed disk, and between writes of usage counts."""


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


class SharedOutcome(StrEnum):
    """The outcomes of work with recordings and their files in the object store."""

    STORED = "stored"
    """A recording was written, or the time of its last use was updated."""
    BROUGHT = "brought"
    """A recording that this store did not have was brought back."""
    READ = "read"
    """A file was read."""
    MISSING = "missing"
    """A file or manifest was missing or damaged."""
    EVICTED = "evicted"
    """A recording was deleted to make room."""
    NO_ROOM = "no_room"
    """A recording was not written, because the budget is used by pinned and new ones."""
    ORPHANED = "orphaned"
    """A file that no recording has was deleted."""
    FAILED = "failed"
    """The object store could not be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStatistics:
    """A snapshot of the recordings in the object store. Counts are since the start."""

    templates: int
    alone: int
    """Number of templates that this store does not have on its disk."""
    size_bytes: int
    budget_bytes: int
    outcomes: dict[str, int]
    """Counts by `SharedOutcome`."""
    trouble: str
    """Why the object store cannot be used now; "" if it can."""


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
    shared: SharedStatistics | None
    """The recordings in the object store; None without one."""

    @property
    def shared_trouble(self) -> str:
        """Why the object store cannot be used now; "" if it can, or if there is none."""
        return self.shared.trouble if self.shared is not None else ""
