"""The settings of an activation store."""

from __future__ import annotations

from dataclasses import dataclass
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
    max_templates: int = 10_000
    max_loads: int = 2
    """Number of parallel loads into memory."""
    max_waiting_bytes: int = 512 << 20
    """Upper bound on the bytes of sections that wait to be written. A larger section is accepted if no other waits."""
    record_idle_s: float = 120.0
    """Seconds without a message after which a recording is abandoned."""
    retry_s: float = 5.0
    """Seconds between attempts to use a failed disk, and between writes of usage counts."""
