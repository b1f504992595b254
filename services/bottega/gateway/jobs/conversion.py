"""What the gateway writes about a job: records in the job store and their order, provenance, and log lines.

A record's spec has no input images. They are stored separately, in a copy of the complete spec, which is deleted when
the job ends. Every log line has the job_id, and the request_id that the worker's lines have, too. It does not rely on
the fields of the current call, because a job often changes during a call of another caller.

Writes of one job keep their order. A job may start on a worker before its start is written, but its end is always
written after its start.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.metadata
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from bottega.addons.interface.views import JobLosses, JobRequest
from bottega.background_tasks import BackgroundTasks, copied
from bottega.clocks import Clock
from bottega.errors import BottegaError, JobCancelled, TooLarge
from bottega.gateway.jobs import specs
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.specs import key_of_result
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.jobs.store import Change, EndTime, JobProgress, JobRecord
from bottega.gateway.jobs.values import JobOutcome
from bottega.rpc.status import from_job_error, to_job_error
from bottega.v1.error_pb2 import JobError
from bottega.v1.generation_pb2 import GenerationSpec, Provenance, StageTime
from bottega.v1.image_pb2 import JOB_STATE_CANCELLED, JOB_STATE_COMPLETED, JOB_STATE_QUEUED
from bottega.v1.worker_pb2 import AttemptDecisions

# Upper bound on a spec without its images: four prompts of 16 KiB, and names of LoRAs and ControlNets.
_MAX_SPEC_BYTES = 256 << 10

_OF_RECORD = frozenset(field.name for field in dataclasses.fields(JobRecord))
# Fields of JobRequest that a record has under the same names.
_OF_REQUEST = tuple(field.name for field in dataclasses.fields(JobRequest) if field.name in _OF_RECORD)

# Seconds for pending writes when the gateway stops. They take longer only if the disk fails.
_CLOSE_S = 2.0

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


@functools.cache
def version() -> str:
    """Return the installed version of the suite."""
    return importlib.metadata.version("bottega-services")


def completed_provenance(job: Job, reported: Provenance) -> Provenance:
    """Add the facts that only the gateway knows to a worker's provenance: parameters, attempts and times."""
    full = Provenance()
    full.CopyFrom(reported)
    full.parameters.CopyFrom(job.bare)
    full.image_digest = job.request.image_digest
    if job.request.mask_digest:
        full.mask.digest = job.request.mask_digest
    full.worker = reported.worker or job.worker
    full.bottega_version = reported.bottega_version or version()
    full.attempts = job.attempts
    full.repeated_steps = job.steps.repeated
    full.times.extend(
        StageTime(stage=stage, seconds=seconds)
        for stage, seconds in (
            ("validate", job.times.validate_s),
            ("acknowledge", job.times.acknowledge_s),
            ("queue", job.times.queue_s),
            ("route", job.times.route_s),
        )
    )
    return full


def answered_provenance(job: Job, source: Job) -> Provenance:
    """Return the provenance of a job that was answered with the stored images of the identical job `source`.

    It says how those images were drawn, even if `source` was answered with stored images itself. Attempts and times are
    those of `job`.
    """
    assert source.provenance is not None
    full = Provenance()
    full.CopyFrom(source.provenance)
    full.identical_job = source.provenance.identical_job or source.job_id
    full.attempts = full.repeated_steps = 0
    del full.times[:]
    full.times.add(stage="validate", seconds=job.times.validate_s)
    return full


def record_of(job: Job, *, steady: float) -> JobRecord:
    """Return the record of a job that was just accepted. `steady` is the current time of the steady clock."""
    return JobRecord(
        **{name: getattr(job.request, name) for name in _OF_REQUEST},
        job_id=job.job_id,
        spec=job.bare.SerializeToString(),
        created_wall=job.created_wall,
        deadline_steady=_deadline_steady(job, steady),
    )


def live_record_of(job: Job, *, steady: float) -> JobRecord:
    """Return the record of a stored job that has not ended. `steady` is the current time of the steady clock."""
    record = dataclasses.replace(record_of(job, steady=steady), sequence=job.sequence)
    return record.progressed(progress_of(job, steady=steady)) or record


def new_record_of(job: Job, *, steady: float) -> JobRecord:
    """Return the record of a job that is not stored yet, at the time `steady`. Raises TooLarge.

    A job that an identical one answers has its outcome already.
    """
    record = record_of(job, steady=steady)
    if len(record.spec) > _MAX_SPEC_BYTES:
        metadata = {"limit": "spec", "bytes": str(_MAX_SPEC_BYTES)}
        raise TooLarge("the request without its images is too large", metadata=metadata)
    if (outcome := job.outcome) is None:
        return record
    assert outcome.provenance is not None
    return record.answered(
        images=outcome.images,
        provenance=outcome.provenance.SerializeToString(),
        end=EndTime(wall=outcome.ended_wall, steady=steady),
        result_key=key_of_result(job.bare, outcome.provenance, tenant=job.request.tenant),
    )


async def inputs_of(job: Job) -> bytes:
    """Return the serialized complete spec of a live job with input images; b"" for all other jobs."""
    if not job.open or not specs.has_images(job.spec):
        return b""
    return await copied(job.request.size_bytes, job.spec.SerializeToString)


def progress_of(job: Job, *, steady: float) -> JobProgress:
    """Return the fields of a live job's record that may change until the job ends.

    Args:
        job: The job.
        steady: The current time of the steady clock.
    """
    return JobProgress(
        state=job.state,
        deadline_steady=_deadline_steady(job, steady),
        started_wall=job.started_wall,
        attempt=job.number,
        deaths=job.losses.deaths,
        decisions=job.decisions.SerializeToString(),
    )


def change_of(outcome: JobOutcome, *, number: int, bare: GenerationSpec, tenant: str, end: EndTime) -> Change:
    """Return the change that writes the end of a job to its record.

    Args:
        outcome: How the job ends.
        number: Number of its newest attempt.
        bare: Its spec without input images.
        tenant: Its tenant.
        end: The time of the end.
    """
    error = _error_of(outcome.error)
    if outcome.state == JOB_STATE_COMPLETED:
        provenance = outcome.provenance.SerializeToString() if outcome.provenance else b""
        key = key_of_result(bare, outcome.provenance, tenant=tenant) if outcome.provenance else ""
        return lambda record: record.completed(
            number, images=outcome.images, provenance=provenance, end=end, result_key=key
        )
    if outcome.state == JOB_STATE_CANCELLED:
        spec = specs.with_short_texts(bare).SerializeToString()
        return lambda record: record.cancelled(error=error, end=end, spec=spec, steps_done=outcome.steps_done)
    return lambda record: record.failed(error=error, end=end, steps_done=outcome.steps_done)


def job_of(record: JobRecord, *, inputs: bytes = b"", life: int, clock: Clock, steady: float) -> Job:
    """Return the job of a record. Previews, checkpoint and times are not in a record and start empty."""
    bare = GenerationSpec.FromString(record.spec)
    left_s = None if record.deadline_steady is None else record.deadline_steady - steady
    job = Job(
        clock=clock,
        spec=GenerationSpec.FromString(inputs) if inputs else bare,
        bare=bare,
        request=JobRequest(**{name: getattr(record, name) for name in _OF_REQUEST}),
        deadline=None if left_s is None else clock.monotonic() + left_s,
        job_id=record.job_id,
        sequence=record.sequence,
        life=life,
        state=record.state if record.live else JOB_STATE_QUEUED,
        number=record.attempt,
        losses=JobLosses(deaths=record.deaths),
        decisions=AttemptDecisions.FromString(record.decisions),
        created_wall=record.created_wall,
        started_wall=record.started_wall,
    )
    if not record.live:
        job.finish(outcome_of(record))
    return job


def outcome_of(record: JobRecord) -> JobOutcome:
    """Return the outcome that is stored in the record of an ended job."""
    assert not record.live
    return JobOutcome(
        state=record.state,
        ended_wall=record.ended_wall or 0.0,
        images=record.images,
        provenance=Provenance.FromString(record.provenance) if record.provenance else None,
        error=from_job_error(JobError.FromString(record.error)) if record.error else None,
        steps_done=record.steps_done,
    )


def _deadline_steady(job: Job, steady: float) -> float | None:
    """Convert a job's deadline to the steady clock, whose current time is `steady`; None means no deadline."""
    return None if job.deadline is None else steady + job.deadline - job.clock.monotonic()


def _error_of(error: BottegaError | None) -> bytes:
    return to_job_error(error).SerializeToString() if error else b""


def job_fields(job: Job) -> dict[str, object]:
    """Return the fields that identify a job in its log lines."""
    return {"job_id": job.job_id, "request_id": job.log_id}


def log_accepted(job: Job) -> None:
    """Log that a job was accepted."""
    _log.info("job accepted", extra={**job_fields(job), "model": job.bare.model})


def log_restored(jobs: int, held: int, seconds: float) -> None:
    """Log that the jobs from before a restart were read."""
    _log.info("jobs restored", extra={"jobs": jobs, "held": held, "seconds": round(seconds, 3)})


def log_attempt_lost(job: Job, error: BottegaError) -> None:
    """Log that the worker of a job's current attempt is lost."""
    _log.warning("attempt lost", extra={**job_fields(job), **_progress(job), "text": error.message})


def log_attempt_returned(job: Job, error: BottegaError) -> None:
    """Log that a worker refused or returned a job's current attempt."""
    _log.warning("attempt returned", extra={**job_fields(job), **_progress(job), "text": error.message})


def log_ended(job: Job) -> None:
    """Log that a job has ended, and how."""
    facts = {**job_fields(job), "model": job.bare.model, "seconds": round(job.age_s, 3), **_progress(job)}
    if job.error is None:
        _log.info("job completed", extra={**facts, **_source(job)})
    elif isinstance(job.error, JobCancelled):
        _log.info("job cancelled", extra=facts)
    else:
        _log.warning("job failed", extra={**facts, "reason": job.error.reason_name, "text": job.error.message})


def _progress(job: Job) -> dict[str, object]:
    return {"attempts": job.attempts, **({"worker": job.worker} if job.worker else {})}


def _source(job: Job) -> dict[str, object]:
    """Return the ID of the identical job whose result answered this one; an empty dict if it was drawn."""
    identical = job.provenance.identical_job if job.provenance else ""
    return {"identical_job": identical} if identical else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingWrite:
    write: Callable[[], Awaitable[Any]]
    result: asyncio.Future[Any] | None = None
    """The result for the caller that waits for the write; None if no caller does."""


class WriteQueue:
    """A queue of writes for each job. In each queue, at most two writes have no caller that waits for them."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._queues: dict[str, deque[_PendingWrite]] = {}
        self._tasks = BackgroundTasks("writing of jobs")

    def enqueue(self, job_id: str, write: Callable[[], Awaitable[object]]) -> None:
        """Queue a write that no caller waits for. It replaces the last such write unless that has begun.

        So each of these writes has to contain the whole status of a job.
        """
        queue = self._queues.get(job_id)
        if queue and len(queue) > 1 and queue[-1].result is None:
            queue.pop()  # not the first: that one is being written
        self._append(job_id, _PendingWrite(write=write))

    async def enqueue_and_wait(self, job_id: str, write: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Return the result of `write`, which runs after all earlier writes of the job.

        Raises CancelledError if `close` gives up on it.
        """
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._append(job_id, _PendingWrite(write=write, result=result))
        return await result

    async def close(self) -> None:
        """Finish as many pending writes as time allows. After a restart, the gateway repeats the others."""
        await self._tasks.join(_CLOSE_S)
        await self._tasks.cancel()

    def _append(self, job_id: str, pending: _PendingWrite) -> None:
        queue = self._queues.get(job_id)
        if queue is not None:
            queue.append(pending)
            return
        self._queues[job_id] = deque([pending])
        self._tasks.start(self._drain(job_id))

    async def _drain(self, job_id: str) -> None:
        queue = self._queues[job_id]
        try:
            while queue:
                await self._run(queue[0])
                queue.popleft()
        finally:
            del self._queues[job_id]
            for pending in queue:  # the gateway stops: these will not be written
                if pending.result is not None:
                    pending.result.cancel()

    async def _run(self, pending: _PendingWrite) -> None:
        try:
            result = await self._storage.retry_until_written(pending.write)
        except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
            if pending.result is not None and not pending.result.done():
                pending.result.set_exception(error)
            elif not isinstance(error, BottegaError):
                _log.exception("a write of a job failed with an unexpected error")
            return
        if pending.result is not None and not pending.result.done():
            pending.result.set_result(result)
