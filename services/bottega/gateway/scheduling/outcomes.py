"""How jobs end: deadlines, the writing of outcomes, and the retry policy for attempts that brought no pictures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from bottega.background_tasks import BackgroundTasks
from bottega.clocks import Clock
from bottega.errors import BottegaError, DeadlineUnmeetable, Draining, NoWorker, Poisoned, WorkerLost
from bottega.gateway.jobs import log_lines
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.scheduling.queue import JobQueue
from bottega.v1.image_pb2 import JOB_STATE_RUNNING, JobState

# How often each worker of a model may refuse or return a job. It is backed off each time, so this is half a minute.
_MAX_RETURNS = 60
# Two workers that died of a job, each running it exclusively, make it a poison pill: README, What is promised.
_POISON_DEATHS = 2
# A caller's clock and ours agree on a deadline up to the time on the wire, and gRPC rounds.
_AT_DEADLINE_S = 0.1


class Deadlines:
    """The timers of the jobs that have a deadline."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def watch(self, job: Job, on_passed: Callable[[Job], None]) -> None:
        """Call `on_passed` with the job when its current deadline, if it has one, has passed."""
        self.unwatch(job)
        if job.deadline is not None:
            left_s = max(0.0, job.deadline - self._clock.monotonic())
            self._timers[job.job_id] = asyncio.get_running_loop().call_later(left_s, on_passed, job)

    def unwatch(self, job: Job) -> None:
        """Stop the timer of a job."""
        timer = self._timers.pop(job.job_id, None)
        if timer is not None:
            timer.cancel()

    def has_passed(self, job: Job) -> bool:
        """Return whether a job's deadline has passed, as far as two clocks can agree."""
        return job.deadline is not None and self._clock.monotonic() > job.deadline - _AT_DEADLINE_S

    def close(self) -> None:
        """Stop all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


class JobFinisher:
    """The finisher of jobs, which writes how they end and publishes that once it is durable."""

    def __init__(self, queue: JobQueue, deadlines: Deadlines, jobs: JobRepository, metrics: GatewayMetrics) -> None:
        self._queue = queue
        self._deadlines = deadlines
        self._jobs = jobs
        self._metrics = metrics
        self._writing = BackgroundTasks("writing of how jobs ended")

    def finish(self, job: Job) -> None:
        """Finish a job whose outcome is decided and of which no attempt runs."""
        self._queue.remove(job)
        self._deadlines.unwatch(job)
        self._writing.start(self._write(job))

    async def join(self) -> None:
        """Return when all outcomes are written, or the repository takes no more."""
        await self._writing.join()

    async def _write(self, job: Job) -> None:
        await self._jobs.finish(job)
        self.count(job)

    def count(self, job: Job) -> None:
        """Log and count a job that has ended, which is durable."""
        log_lines.ended(job)
        outcome = JobState.Name(job.state).removeprefix("JOB_STATE_").lower()
        reason = job.error.reason_name.lower() if job.error else ""
        self._metrics.job_ended(outcome, seconds=job.age_s, reason=reason, tenant=job.request.tenant)


async def detach_when_idle(jobs: Iterable[Job], *, is_held: Callable[[Job], bool]) -> None:
    """Return when no worker has any of the jobs.

    Args:
        jobs: Jobs that have not ended.
        is_held: Returns whether a job waits for the worker that had it before a restart. That worker may not come.
    """

    async def detach(job: Job) -> None:
        if not is_held(job):
            await _without_worker(job)
        if job.live:
            job.detach(draining())

    await asyncio.gather(*map(detach, jobs))


def draining() -> Draining:
    """Return the error of callers that follow a job at a gateway that stops."""
    return Draining("the gateway is stopping; retry", retry_after_s=1.0)


async def _without_worker(job: Job) -> None:
    """Return when no worker has the job and nothing of it has to be written."""
    changed = asyncio.Event()
    job.listeners.add(changed.set)
    try:
        while job.live and (job.state == JOB_STATE_RUNNING or not job.open):
            changed.clear()
            await changed.wait()
    finally:
        job.listeners.discard(changed.set)


def failure_after_loss(job: Job, *, max_attempts: int) -> BottegaError | None:
    """Return why a job whose worker was lost fails; None if it is retried."""
    if job.losses.deaths >= _POISON_DEATHS:
        return Poisoned(f"{job.losses.deaths} workers died of this job: each ran it alone")
    if job.losses.beside_others >= max_attempts:
        return WorkerLost(f"{job.losses.beside_others} workers were lost with this job", retry_after_s=1.0)
    return None


def failure_after_return(job: Job, error: BottegaError, *, workers: int, by_addon: bool) -> BottegaError | None:
    """Return why a job that a worker refused or returned fails; None if it is retried.

    Args:
        job: The job.
        error: The error of the worker.
        workers: Number of workers of the job's model.
        by_addon: Whether an add-on was the cause.
    """
    if job.losses.returns < _MAX_RETURNS * max(1, workers):
        return None
    return error if by_addon else NoWorker(f"no worker took the job: {error.message}", retry_after_s=1.0)


def unmeetable(estimate_s: float, left_s: float, *, retry_after_s: float | None = None) -> DeadlineUnmeetable:
    """Return the error of a job that would end after its deadline.

    Args:
        estimate_s: Seconds until it would end.
        left_s: Seconds until its deadline.
        retry_after_s: Seconds after which a retry may help; None if no retry does.
    """
    return DeadlineUnmeetable(
        f"it would be done in about {estimate_s:.1f} s, and the deadline is in {left_s:.1f} s",
        metadata={"estimate_s": f"{estimate_s:.3f}"},
        retry_after_s=retry_after_s,
    )
