"""Jobs as the store keeps them, and back. Knows no store.

A record's spec has no input images; those travel beside it, as the complete spec, and go when the job ends.
"""

from __future__ import annotations

from bottega.errors import BottegaError
from bottega.gateway.clock import Clock
from bottega.gateway.jobs.input_images import has_images
from bottega.gateway.jobs.job import LIVE, Job
from bottega.gateway.jobs.store import JobRecord, StoredPicture
from bottega.gateway.jobs.values import JobOutcome, StoredImage
from bottega.process import copied
from bottega.rpc.status import from_job_error, to_job_error
from bottega.v1 import image_pb2
from bottega.v1.error_pb2 import JobError
from bottega.v1.generation_pb2 import GenerationSpec, Provenance


def record_of(job: Job) -> JobRecord:
    """What is kept of a job that was just accepted."""
    return JobRecord(
        job_id=job.job_id,
        request_id=job.request_id,
        log_id=job.log_id,
        ends_with_caller=job.ends_with_caller,
        peer=job.peer,
        fingerprint=job.fingerprint,
        spec=job.bare.SerializeToString(),
        shape=job.shape,
        image_digest=job.image_digest,
        size_bytes=job.size_bytes,
        created_wall=job.created_wall,
        deadline_wall=deadline_wall(job),
    )


def deadline_wall(job: Job) -> float | None:
    """Its deadline in Unix seconds; None is without bound."""
    return None if job.deadline is None else job.clock.wall() + job.deadline - job.clock.monotonic()


async def inputs_of(job: Job) -> bytes:
    """What a job needs beside its record while it is live; nothing where it has no input images."""
    return await copied(job.size_bytes, job.spec.SerializeToString) if has_images(job.spec) else b""


def job_of(record: JobRecord, *, inputs: bytes = b"", life: int, clock: Clock) -> Job:
    """The job of a record. What only matters while it is drawn (previews, checkpoint, times) begins anew."""
    bare = GenerationSpec.FromString(record.spec)
    left_s = None if record.deadline_wall is None else record.deadline_wall - clock.wall()
    job = Job(
        clock=clock,
        spec=GenerationSpec.FromString(inputs) if inputs else bare,
        bare=bare,
        shape=record.shape,
        fingerprint=record.fingerprint,
        image_digest=record.image_digest,
        size_bytes=record.size_bytes,
        request_id=record.request_id,
        log_id=record.log_id,
        ends_with_caller=record.ends_with_caller,
        peer=record.peer,
        deadline=None if left_s is None else clock.monotonic() + left_s,
        job_id=record.job_id,
        sequence=record.sequence,
        life=life,
        state=record.state if record.live else image_pb2.JOB_STATE_QUEUED,
        number=record.attempt,
        deaths=record.deaths,
        loras_step=record.loras_step,
        created_wall=record.created_wall,
        started_wall=record.started_wall,
    )
    if not record.live:
        job.end(outcome_of(record))
    return job


def outcome_of(record: JobRecord) -> JobOutcome:
    """How a job that has ended did."""
    assert record.state not in LIVE
    return JobOutcome(
        state=record.state,
        ended_wall=record.ended_wall or 0.0,
        pictures=tuple(StoredImage(digest=kept.digest, size_bytes=kept.size_bytes) for kept in record.pictures),
        provenance=Provenance.FromString(record.provenance) if record.provenance else None,
        error=from_job_error(JobError.FromString(record.error)) if record.error else None,
    )


def pictures_of(outcome: JobOutcome) -> tuple[StoredPicture, ...]:
    """Its images, as the store keeps them."""
    return tuple(StoredPicture(digest=picture.digest, size_bytes=picture.size_bytes) for picture in outcome.pictures)


def provenance_of(outcome: JobOutcome) -> bytes:
    """Its provenance, as the store keeps it."""
    return outcome.provenance.SerializeToString() if outcome.provenance else b""


def error_of(error: BottegaError | None) -> bytes:
    """Why a job has ended, as the store keeps it."""
    return to_job_error(error).SerializeToString() if error else b""
