"""The job stores that the conformance tests run against: another backend is another line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from bottega.clocks import SharedClock
from bottega.gateway.jobs.store import Change, EndTime, JobProgress, JobRecord, JobStore, OutboxEvent, SqliteJobStore
from bottega.gateway.jobs.store.postgresql import PostgresJobStore
from bottega.gateway.jobs.values import StoredImage
from bottega.storage.postgresql import PostgresDatabase
from bottega.v1.image_pb2 import JOB_STATE_QUEUED, JOB_STATE_RUNNING, PRIORITY_HIGH
from tests.fakes.memory_storage import MemoryJobStore, Shelf
from tests.support.postgresql import shared_server

# Denoising steps that jobs which fail or are cancelled had made.
STEPS_DONE = 4

_SHELVES: dict[Path, Shelf] = {}
# URLs of the databases that belong to folders. They go with the server.
_DATABASES: dict[Path, str] = {}


def _postgresql(folder: Path) -> PostgresJobStore:
    if folder not in _DATABASES:
        _DATABASES[folder] = shared_server().url(shared_server().new_database())
    database = PostgresDatabase(_DATABASES[folder], application="bottega test", max_connections=4)
    return PostgresJobStore(database, clock=SharedClock())


# Each makes one more store, not open yet, of the jobs that belong to a folder.
BACKENDS: Mapping[str, Callable[[Path], JobStore]] = MappingProxyType(
    {
        "sqlite": lambda folder: SqliteJobStore(folder / "jobs.sqlite"),
        "postgresql": _postgresql,
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
        priority=PRIORITY_HIGH,
        fingerprint=f"fingerprint of {job_id}",
        spec=spec or b"spec\x00" + job_id.encode(),
        shape=(16, 24),
        image_digest="d" * 64,
        mask_digest="e" * 64,
        kept_digest="f" * 64,
        result_size=(640, 480),
        size_bytes=1234,
        created_wall=created_wall,
        deadline_steady=created_wall + 60,
    )


def sample_event(job: JobRecord) -> OutboxEvent:
    """An event of the end of a job, which is due later."""
    return OutboxEvent(
        event_id=f"evt_{job.job_id}",
        job_id=job.job_id,
        tenant=job.tenant,
        kind="job.ended",
        url="https://hooks.example/x",
        host="hooks.example",
        body=b"body\x00" + job.job_id.encode(),
        created_wall=job.ended_wall or 0,
        tried_since_steady=job.ended_steady or 0,
        due_steady=100,
    )


def running(attempt: int, *, started_wall: float = 1.0, decisions: bytes | None = None) -> Change:
    def change(job: JobRecord) -> JobRecord | None:
        now = replace(_progress(job), state=JOB_STATE_RUNNING, attempt=attempt, started_wall=started_wall)
        return job.progressed(now if decisions is None else replace(now, decisions=decisions))

    return change


def queued(attempt: int, *, deaths: int = 0) -> Change:
    return lambda job: job.progressed(replace(_progress(job), state=JOB_STATE_QUEUED, attempt=attempt, deaths=deaths))


def completed(
    attempt: int,
    *,
    ended_wall: float,
    images: tuple[StoredImage, ...] = (),
    provenance: bytes = b"how",
    result_key: str = "",
) -> Change:
    end = EndTime(wall=ended_wall, steady=ended_wall)
    return lambda job: job.completed(attempt, images=images, provenance=provenance, end=end, result_key=result_key)


def answered(
    new: JobRecord, *, ended_wall: float, images: tuple[StoredImage, ...] = (), result_key: str = ""
) -> JobRecord:
    """A new job that an identical one's result answers."""
    end = EndTime(wall=ended_wall, steady=ended_wall)
    return new.answered(images=images, provenance=b"how", end=end, result_key=result_key)


def failed(*, ended_wall: float, ended_steady: float | None = None, error: bytes = b"why") -> Change:
    end = EndTime(wall=ended_wall, steady=ended_wall if ended_steady is None else ended_steady)
    return lambda job: job.failed(error=error, end=end, steps_done=STEPS_DONE)


def cancelled(*, ended_wall: float, error: bytes = b"why", spec: bytes | None = None) -> Change:
    """It was cancelled. spec: what is kept of its spec; None is all."""
    end = EndTime(wall=ended_wall, steady=ended_wall)
    return lambda job: job.cancelled(
        error=error, end=end, spec=job.spec if spec is None else spec, steps_done=STEPS_DONE
    )


def _progress(job: JobRecord) -> JobProgress:
    return JobProgress(
        state=job.state,
        deadline_steady=job.deadline_steady,
        started_wall=job.started_wall,
        attempt=job.attempt,
        deaths=job.deaths,
        decisions=job.decisions,
    )
