"""The job stores that the conformance tests run against: another backend is another line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from bottega.gateway.jobs.store import JobRecord, JobStore, SqliteJobStore
from tests.fakes.memory_storage import MemoryJobStore, Shelf

_SHELVES: dict[Path, Shelf] = {}

# Each makes one more store, not open yet, of the jobs that belong to a folder.
BACKENDS: Mapping[str, Callable[[Path], JobStore]] = MappingProxyType(
    {
        "sqlite": lambda folder: SqliteJobStore(folder / "jobs.sqlite"),
        "memory": lambda folder: MemoryJobStore(_SHELVES.setdefault(folder, Shelf())),
    }
)


def record(job_id: str = "j1", *, request_id: str = "", created_wall: float = 100.0, spec: bytes = b"") -> JobRecord:
    """A queued job with something in every field that a caller sets."""
    return JobRecord(
        job_id=job_id,
        request_id=request_id,
        log_id=f"log-{job_id}",
        ends_with_caller=not request_id,
        fingerprint=f"fingerprint of {job_id}",
        spec=spec or b"spec\x00" + job_id.encode(),
        shape=(16, 24),
        image_digest="d" * 64,
        size_bytes=1234,
        created_wall=created_wall,
        deadline_wall=created_wall + 60,
    )
