"""The settings of an activation store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStoreSettings:
    """The settings of an ActivationStore."""

    folder: Path
    """Contains records, sections and profiles; used by one process at a time."""
    disk_budget_bytes: int
    """Upper bound on the files of all templates. The disk may have less space."""
    memory_budget_bytes: int
    """Upper bound on files in memory, which workers of this host map, without sections that wait to be written."""
    template_budget_bytes: int = 0
    """Upper bound on one template; 0 for no bound."""
    min_free_bytes: int = 0
    """Free space that is left to other programs, but no more than 5 % of the disk."""
    max_templates: int = 10_000
    max_loads: int = 2
    """Parallel loads into memory."""
    max_waiting_bytes: int = 512 << 20
    """Upper bound on sections that wait to be written; a larger section is accepted if no other waits."""
    record_idle_s: float = 120.0
    """Seconds without a message after which a recording is given up."""
    retry_s: float = 5.0
    """Seconds between attempts to use a failed disk, and between writes of usage counts."""
