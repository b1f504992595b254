"""What follows from what the dispatcher tells of attempts: the job goes on, waits again, or ends.

Holds the rules of what a loss means. Knows no wire and no contents of jobs.
"""

from __future__ import annotations

from collections import deque

from bottega.errors import BottegaError, DeadlinePassed, NoControlNet, NoWorker, Poisoned, WorkerLost
from bottega.gateway.addons.controlnets.placement import ControlNetPlacement
from bottega.gateway.dispatch.attempts import died_alone, is_death
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs import log_lines
from bottega.gateway.jobs.deadlines import Deadlines
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.values import StoredImage
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.scheduling.finishing import JobFinisher
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.scheduler import Scheduler
from bottega.v1 import worker_pb2
from bottega.v1.generation_pb2 import Provenance

# How often each worker of a model may not take a job, or give it back: with its rests that is half a minute.
_MOST_RETURNS = 60
# Attempts that have just completed, which reports on their way may still tell of.
_JUST_COMPLETED = 256
# README, what is promised when what dies: two workers that died of a job, each running it alone, make it poison.
_POISONOUS = 2


class AttemptOutcomes:
    """Observes the dispatcher. max_attempts: workers that may be cut off with a job, or die of others beside it."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        placement: ControlNetPlacement,
        queue: JobQueue,
        matching: Scheduler,
        deadlines: Deadlines,
        endings: JobFinisher,
        log: JobRepository,
        metrics: GatewayMetrics,
        max_attempts: int,
    ) -> None:
        self._fleet = fleet
        self._placement = placement
        self._queue = queue
        self._matching = matching
        self._deadlines = deadlines
        self._endings = endings
        self._jobs = log
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._completed: deque[tuple[str, int]] = deque(maxlen=_JUST_COMPLETED)

    def has_completed(self, attempt: worker_pb2.AttemptId) -> bool:
        """Whether it has just brought all images, so that its worker may still be telling that it runs."""
        return (attempt.job_id, attempt.number) in self._completed

    def attempt_sent(self, job: Job) -> None:
        """See AttemptObserver."""
        self._metrics.routed(queue_s=job.routed_at - job.queued_at, route_s=job.mark_dispatched())
        self._jobs.save(job)

    def attempt_advanced(self, job: Job) -> None:
        """See AttemptObserver."""
        self._matching.soon(job.spec.model)

    def attempt_decided(self, job: Job) -> None:
        """See AttemptObserver."""
        self._jobs.save(job)

    def attempt_lost(self, job: Job, number: int, error: BottegaError) -> None:
        """See AttemptObserver."""
        if not job.is_current(number):
            return
        self._metrics.attempt_lost()
        log_lines.attempt_lost(job, error)
        job.requeue_lost(number, died=is_death(error), exclusive=died_alone(error))
        if job.deaths >= _POISONOUS:
            self._endings.fail(job, Poisoned(f"{job.deaths} workers died of this job: each ran it alone"))
        elif job.losses >= self._max_attempts:
            why = WorkerLost(f"{job.losses} workers were lost with this job", retry_after_s=1.0)
            self._endings.fail(job, why)
        else:
            self.wait_again(job)

    def attempt_returned(self, job: Job, number: int, error: BottegaError) -> None:
        """See AttemptObserver."""
        if not job.is_current(number):
            return
        self._metrics.attempt_returned()
        log_lines.attempt_returned(job, error)
        if isinstance(error, NoControlNet):
            self._placement.let_rest(job, error)
        else:
            self._fleet.let_rest(job.worker)
        job.requeue_returned(number)
        if job.returns >= _MOST_RETURNS * max(1, len(self._fleet.serving(job.spec.model))):
            self._endings.fail(job, _not_taken(error))
        else:
            self.wait_again(job)

    def attempt_failed(self, job: Job, number: int, error: BottegaError) -> None:
        """See AttemptObserver."""
        if isinstance(error, DeadlinePassed) and not self._deadlines.has_passed(job):
            self.attempt_returned(job, number, error)  # the worker only knew of the deadline that there was at first
        elif job.fail(error, number):
            self._endings.decided(job)

    def attempt_completed(
        self, job: Job, number: int, pictures: tuple[StoredImage, ...], provenance: Provenance
    ) -> None:
        """See AttemptObserver."""
        if job.complete(number, pictures, provenance):
            self._queue.one_done()
            self._completed.append((job.job_id, number))
            self._endings.decided(job)

    def wait_again(self, job: Job) -> None:
        """Its attempt came to nothing: lines the job up again, before the others, where it may have another one."""
        if job.fail_if_exhausted():
            self._endings.decided(job)
        else:
            self._jobs.save(job)
            self._matching.line_up_again(job)


def _not_taken(error: BottegaError) -> BottegaError:
    """Why a job fails that nobody takes, however often it is offered."""
    if isinstance(error, NoControlNet):
        return error
    return NoWorker(f"no worker took the job: {error.message}", retry_after_s=1.0)
