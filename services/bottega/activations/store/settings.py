"""What the core of an activation store may be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStoreSettings:
    """What an ActivationStore may be told.

    folder: of records, sections and profiles; one process at a time has it. disk_budget_bytes: of all files of all
    templates, as far as the disk has room for them. memory_budget_bytes: of files in memory, which workers of the host
    map; what waits to be written comes on top. template_budget_bytes: of one template; 0 is without bound.
    min_free_bytes: of the disk, that are left to others; of one smaller than 20 times that, a twentieth. max_templates:
    in number. max_loads: files that are read into memory at once. max_waiting_bytes: of sections that wait to be
    written; one larger is taken where none waits. record_idle_s: after which a worker that began to record a template,
    and sends nothing of it, has given that up. retry_s: after which a disk that failed is tried again, and after which
    what was counted is written at the latest.
    """

    folder: Path
    disk_budget_bytes: int
    memory_budget_bytes: int
    template_budget_bytes: int = 0
    min_free_bytes: int = 0
    max_templates: int = 10_000
    max_loads: int = 2
    max_waiting_bytes: int = 512 << 20
    record_idle_s: float = 120.0
    retry_s: float = 5.0
