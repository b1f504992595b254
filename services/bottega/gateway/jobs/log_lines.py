"""The gateway's log lines about jobs: one for each change of a job's state.

Every line has the job_id, and the request_id that the worker's lines have, too. It does not rely on the fields of the
current call, because a job often changes during a call of another caller.
"""

from __future__ import annotations

import logging

from bottega.errors import BottegaError, JobCancelled
from bottega.gateway.jobs.job import Job

_log = logging.getLogger(__name__)


def job_fields(job: Job) -> dict[str, object]:
    """Return the fields that identify a job in its log lines."""
    return {"job_id": job.job_id, "request_id": job.log_id}


def accepted(job: Job) -> None:
    """Log that a job was accepted."""
    _log.info("job accepted", extra={**job_fields(job), "model": job.bare.model})


def restored(jobs: int, held: int, seconds: float) -> None:
    """Log that the jobs from before a restart were read."""
    _log.info("jobs restored", extra={"jobs": jobs, "held": held, "seconds": round(seconds, 3)})


def attempt_lost(job: Job, error: BottegaError) -> None:
    """Log that the worker of a job's current attempt is lost."""
    _log.warning("attempt lost", extra={**job_fields(job), **_progress(job), "text": error.message})


def attempt_returned(job: Job, error: BottegaError) -> None:
    """Log that a worker refused or returned a job's current attempt."""
    _log.warning("attempt returned", extra={**job_fields(job), **_progress(job), "text": error.message})


def ended(job: Job) -> None:
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
