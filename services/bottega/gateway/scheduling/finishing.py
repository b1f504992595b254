"""How a job ends that is drawn no further: it leaves wherever it waits or runs; that is written, and told then.

Knows no reason for an end, and no rule.
"""

from __future__ import annotations

import asyncio

from bottega.errors import BottegaError
from bottega.gateway.dispatch.dispatcher import Dispatcher
from bottega.gateway.jobs import log_lines
from bottega.gateway.jobs.deadlines import Deadlines
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.recovery import AttemptRecovery
from bottega.gateway.scheduling.scheduler import Scheduler
from bottega.v1.image_pb2 import JobState


class JobFinisher:
    """Every way out for jobs. Close it last."""

    def __init__(
        self,
        *,
        queue: JobQueue,
        dispatcher: Dispatcher,
        adoption: AttemptRecovery,
        deadlines: Deadlines,
        matching: Scheduler,
        log: JobRepository,
        metrics: GatewayMetrics,
    ) -> None:
        self._queue = queue
        self._dispatcher = dispatcher
        self._adoption = adoption
        self._deadlines = deadlines
        self._matching = matching
        self._jobs = log
        self._metrics = metrics
        self._ending: set[asyncio.Task[None]] = set()

    def cancel(self, job: Job, why: str = "the job was cancelled") -> None:
        """Cancels a job; one that has ended stays as it is."""
        if job.cancel(why):
            self._dispatcher.drop(job)
            self.decided(job)

    def fail(self, job: Job, error: BottegaError) -> None:
        """Fails a job; one that has ended stays as it is."""
        if job.fail(error):
            self._dispatcher.drop(job)
            self.decided(job)

    def decided(self, job: Job) -> None:
        """How the job ends is decided, and no attempt at it runs: that is written, and told then."""
        self._queue.remove(job)
        self._adoption.let_go(job)
        self._deadlines.unwatch(job)
        task = asyncio.create_task(self._end(job))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        self._matching.at_once(job.bare.model)

    async def close(self) -> None:
        """Returns when all that was decided is told, or is for a later life to tell."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _end(self, job: Job) -> None:
        await self._jobs.finish(job)
        log_lines.ended(job)
        self._metrics.job_ended(JobState.Name(job.state).removeprefix("JOB_STATE_").lower())
