"""How jobs end, or are left to a later life of the gateway, and the retry policy: whether a job whose attempt came to
nothing waits for another one, or fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, DeadlineUnmeetable, Draining, NoWorker, Poisoned, WorkerLost
from bottega.gateway.jobs import log_lines
from bottega.gateway.jobs.deadlines import Deadlines
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.scheduling.queue import JobQueue
from bottega.v1.image_pb2 import JOB_STATE_RUNNING, JobState

# How often each worker of a model may refuse a job, or return it: as it is backed off each time, that is half a minute.
_MOST_RETURNS = 60
# README, what is promised when what dies: two workers that died of a job, each running it exclusively, make it a poison
# pill.
_POISON_DEATHS = 2


class JobFinisher:
    """Finishes jobs: writes how they end, and publishes that then."""

    def __init__(self, queue: JobQueue, deadlines: Deadlines, jobs: JobRepository, metrics: GatewayMetrics) -> None:
        self._queue = queue
        self._deadlines = deadlines
        self._jobs = jobs
        self._metrics = metrics
        self._writing = BackgroundTasks("writing of how jobs ended")

    def finish(self, job: Job) -> None:
        """How the job ends is decided, and no attempt at it runs."""
        self._queue.remove(job)
        self._deadlines.unwatch(job)
        self._writing.start(self._write(job))

    async def join(self) -> None:
        """Returns when all of them are written, or the repository takes no more."""
        await self._writing.join()

    async def _write(self, job: Job) -> None:
        await self._jobs.finish(job)
        self.count(job)

    def count(self, job: Job) -> None:
        """It has ended, and that is durable."""
        log_lines.ended(job)
        outcome = JobState.Name(job.state).removeprefix("JOB_STATE_").lower()
        reason = job.error.reason_name.lower() if job.error else ""
        self._metrics.job_ended(outcome, seconds=job.age_s, reason=reason, tenant=job.request.tenant)


async def detach_when_idle(jobs: Iterable[Job], *, is_held: Callable[[Job], bool]) -> None:
    """Returns when no worker has any of the jobs. is_held: whether a job waits for its worker, and may not get it."""

    async def detach(job: Job) -> None:
        if not is_held(job):
            await _without_worker(job)
        if job.live:
            job.detach(draining())

    await asyncio.gather(*map(detach, jobs))


def draining() -> Draining:
    """Why nobody follows a job here any more."""
    return Draining("the gateway is stopping; call again", retry_after_s=1.0)


async def _without_worker(job: Job) -> None:
    """Returns when no worker has the job and nothing of it has to be written."""
    changed = asyncio.Event()
    job.listeners.add(changed.set)
    try:
        while job.live and (job.state == JOB_STATE_RUNNING or not job.open):
            changed.clear()
            await changed.wait()
    finally:
        job.listeners.discard(changed.set)


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


def unmeetable(estimate_s: float, left_s: float, *, retry_after_s: float | None = None) -> DeadlineUnmeetable:
    """The error of a job that would end so many seconds from now, and has so many."""
    return DeadlineUnmeetable(
        f"it would be done in about {estimate_s:.1f} s, and the deadline is in {left_s:.1f} s",
        metadata={"estimate_s": f"{estimate_s:.3f}"},
        retry_after_s=retry_after_s,
    )
