"""The retry policy: whether a job whose attempt came to nothing waits for another one, or fails."""

from __future__ import annotations

from bottega.errors import BottegaError, NoWorker, Poisoned, WorkerLost
from bottega.gateway.jobs.job import Job

# How often each worker of a model may refuse a job, or return it: as it is backed off each time, that is half a minute.
_MOST_RETURNS = 60
# README, what is promised when what dies: two workers that died of a job, each running it exclusively, make it a poison
# pill.
_POISON_DEATHS = 2


def failure_after_loss(job: Job, *, max_attempts: int) -> BottegaError | None:
    """Why a job fails whose worker was lost; None where it is retried."""
    if job.losses.deaths >= _POISON_DEATHS:
        return Poisoned(f"{job.losses.deaths} workers died of this job: each ran it alone")
    if job.losses.beside_others >= max_attempts:
        return WorkerLost(f"{job.losses.beside_others} workers were lost with this job", retry_after_s=1.0)
    return None


def failure_after_return(job: Job, error: BottegaError, *, workers: int, by_addon: bool) -> BottegaError | None:
    """Why a job fails that a worker refused or returned; None where it is retried.

    workers: of its model. by_addon: whether an add-on was the cause.
    """
    if job.losses.returns < _MOST_RETURNS * max(1, workers):
        return None
    return error if by_addon else NoWorker(f"no worker took the job: {error.message}", retry_after_s=1.0)
