"""The end of jobs: deadlines, estimates of the completion time, the writing of outcomes, and the retry policy.

Estimates say where each pending job is in its queue, when it completes, and whether it can meet its deadline. A queue
and a fleet may be large, so the estimates of all jobs are computed once a second, in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bottega.background_tasks import BackgroundTasks
from bottega.clocks import Clock
from bottega.errors import BottegaError, DeadlineUnmeetable, Draining, NoWorker, Poisoned, WorkerLost
from bottega.gateway.jobs import conversion
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.snapshot import FleetSnapshot
from bottega.gateway.scheduling.worker_plan import ResourceRequest, WorkerPlan, WorkerState
from bottega.v1.image_pb2 import JOB_STATE_RUNNING, JobState, Priority

# Seconds. An older forecast may contain jobs that have ended, so it refuses no job. A new one takes milliseconds.
_FRESH_S = 0.05
# A job that would be late by less than this share is admitted, because step times are not known more exactly.
_TOLERANCE = 0.1
# Number of forecasts that are cached for a tenant and model, one for each set of needs and priority.
_KINDS = 16
# A job that would wait for others is admitted only with this share of its time to spare. In a queue as long as
# deadlines allow, every job would end at the last moment, and one that takes longer than expected would make all late.
_SPARE = 0.3
# How often each worker may refuse or return a job. Each time it gets no job for a while: half a minute in all.
_MAX_RETURNS = 60
# Number of workers that may die while running a job alone. Then the job fails as POISONED (README of the gateway).
_POISON_DEATHS = 2
# Tolerance in seconds for the transfer time of a deadline and for gRPC's rounding.
_AT_DEADLINE_S = 0.1


class QueueForecast:
    """Predicts when each pending job completes if no more jobs come and the least loaded worker takes the next one.

    It is only used for queue positions and deadlines. The policy assigns jobs on its own.
    """

    def __init__(self, workers: Sequence[WorkerState]) -> None:
        measured = not all(worker.unmeasured for worker in workers)
        self._plans = [WorkerPlan(worker) for worker in workers] if measured else []
        self._loads_s = [plan.load_s for plan in self._plans]
        self._lines: list[list[int]] = [[] for _ in self._plans]
        self._size = 0

    @property
    def size(self) -> int:
        """Number of jobs that were added."""
        return self._size

    def add(self, request: ResourceRequest) -> None:
        """Add a job as the last one."""
        if self._plans:
            least = self._least_loaded()
            self._loads_s[least] += self._plans[least].state.alone_s(request)
            self._plans[least].add(request, bound=False)
            self._lines[least].append(self._size)
        self._size += 1

    def next_completion_s(self, request: ResourceRequest) -> float | None:
        """Return the expected seconds until a new job would complete; None while no step has been measured."""
        if not self._plans:
            return None
        plan = self._plans[self._least_loaded()]
        return plan.completions_s(request)[-1] + plan.state.fixed_s

    def least_s(self, request: ResourceRequest) -> float | None:
        """Return the seconds that a job takes alone on the fastest worker; None while no step has been measured."""
        if not self._plans or any(plan.unmeasured(request) for plan in self._plans):
            return None
        return min(plan.state.alone_s(request) + plan.state.fixed_s for plan in self._plans)

    def completions_s(self) -> list[float | None]:
        """Return the expected seconds until each added job completes; None while no step has been measured."""
        ends: list[float | None] = [None] * self._size
        for plan, line in zip(self._plans, self._lines, strict=True):
            if not line:
                continue
            for index, end_s in zip(line, plan.completions_s()[len(plan.state.running) :], strict=True):
                ends[index] = end_s + plan.state.fixed_s
        return ends

    def _least_loaded(self) -> int:
        return self._loads_s.index(min(self._loads_s))


def forecast(requests: Iterable[ResourceRequest], workers: Sequence[WorkerState]) -> list[float | None]:
    """Return the expected seconds until each pending job completes; None while no step has been measured."""
    queue = QueueForecast(workers)
    for request in requests:
        queue.add(request)
    return queue.completions_s()


_Kind = tuple[ResourceRequest, "Priority.ValueType"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedForecast:
    """A cached forecast of the jobs that are served before the next job with the same needs and priority."""

    forecast: QueueForecast
    made_at: float


class QueueEstimates:
    """Estimates completion times of queued jobs. Call `publish_all` each second, and `publish` for each new job."""

    def __init__(self, queue: JobQueue, snapshot: FleetSnapshot, clock: Clock) -> None:
        self._queue = queue
        self._snapshot = snapshot
        self._clock = clock
        # By model and tenant, and by what a job needs and its priority: jobs that have all of these in common are
        # served in the order in which they come.
        self._forecasts: dict[tuple[str, str], dict[_Kind, _TimedForecast]] = {}

    def publish(self, job: Job) -> None:
        """Set the queue position and estimate of a new job, using a forecast that is at most a second old."""
        request = self._snapshot.resource_request(job)
        timed = self._known_forecast(job, request) or self._forecast(job, request)
        estimate_s = timed.forecast.next_completion_s(request)
        job.set_queue_position(self._queue.place(job), estimate_s)
        # Forecasts of kinds that are served before it get it too, and are a little too late until the next second. No
        # job is refused for that, because a forecast that is too late is made anew; see check_deadline.
        for other in self._forecasts[_whose(job)].values():
            other.forecast.add(request)

    async def publish_all(self) -> None:
        """Set the queue position and estimate of every job in the queue."""
        self._forecasts.clear()
        self._snapshot.estimate_anew()
        for model in self._queue.models():
            jobs = list(self._queue.line(model))
            requests = [self._snapshot.resource_request(job) for job in jobs]
            ends = await asyncio.to_thread(forecast, requests, self._snapshot.workers_of(model))
            by_job = {job.job_id: end for job, end in zip(jobs, ends, strict=True)}
            for place, job in enumerate(self._queue.line(model)):
                if job.job_id in by_job:  # one that came meanwhile has its position
                    job.set_queue_position(place, by_job[job.job_id])

    def check_deadline(self, job: Job) -> None:
        """Raise DeadlineUnmeetable for a job that would end after its deadline if it were queued now.

        While no step has been measured, every job is admitted.
        """
        if job.deadline is None:
            return
        request = self._snapshot.resource_request(job)
        left_s = job.deadline - self._clock.monotonic()
        timed = self._known_forecast(job, request) or self._forecast(job, request)
        if _fits(timed.forecast, request, left_s):
            return
        if timed.made_at < self._clock.monotonic() - _FRESH_S:
            timed = self._forecast(job, request)
        estimate_s = timed.forecast.next_completion_s(request)
        if estimate_s is None or _fits(timed.forecast, request, left_s):
            return
        # A retry helps if other jobs are in the way, and does not if its own steps take too long.
        hopeless = _too_long(timed.forecast.least_s(request), left_s)
        raise unmeetable(estimate_s, left_s, retry_after_s=None if hopeless else self._queue.retry_after_s())

    def unmeetable(self, model: str) -> Iterator[tuple[Job, DeadlineUnmeetable]]:
        """Yield the waiting jobs that would miss their deadline even if they ran alone now, each with its error."""
        jobs = [job for job in self._queue.line(model) if job.deadline is not None]
        if not jobs:
            return
        idle = QueueForecast(self._snapshot.workers_of(model))
        for job in jobs:
            assert job.deadline is not None
            least_s = idle.least_s(self._snapshot.resource_request(job))
            left_s = job.deadline - self._clock.monotonic()
            if least_s is not None and _too_long(least_s, left_s):
                yield job, unmeetable(least_s, left_s)

    def _known_forecast(self, job: Job, request: ResourceRequest) -> _TimedForecast | None:
        return self._forecasts.get(_whose(job), {}).get((request, job.request.priority))

    def _forecast(self, job: Job, request: ResourceRequest) -> _TimedForecast:
        """Compute the forecast of the jobs served before this one, or before the next one with the same needs."""
        forecast = QueueForecast(self._snapshot.workers_of(job.bare.model))
        for other in self._queue.before(job):
            forecast.add(self._snapshot.resource_request(other))
        known = self._forecasts.setdefault(_whose(job), {})
        kind = request, job.request.priority
        if kind not in known and len(known) >= _KINDS:
            del known[next(iter(known))]
        timed = known[kind] = _TimedForecast(forecast=forecast, made_at=self._clock.monotonic())
        return timed


def _whose(job: Job) -> tuple[str, str]:
    """Return the job's model and tenant."""
    return job.bare.model, job.request.tenant


def _fits(forecast: QueueForecast, request: ResourceRequest, left_s: float) -> bool:
    """Return whether a job would complete within `left_s` seconds; True if that cannot be estimated."""
    estimate_s = forecast.next_completion_s(request)
    allowed_s = left_s * (1 - _SPARE) if forecast.size else left_s * (1 + _TOLERANCE)
    return estimate_s is None or estimate_s <= allowed_s


def _too_long(seconds: float | None, left_s: float) -> bool:
    return seconds is not None and seconds > left_s * (1 + _TOLERANCE)


class Deadlines:
    """Timers for the deadlines of jobs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def watch(self, job: Job, on_passed: Callable[[Job], None]) -> None:
        """Call `on_passed` with the job when its current deadline has passed. Does nothing for a job without one."""
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
        """Return whether a job's deadline has passed, with a tolerance for clock differences and gRPC's rounding."""
        return job.deadline is not None and self._clock.monotonic() > job.deadline - _AT_DEADLINE_S

    def close(self) -> None:
        """Stop all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


class JobFinisher:
    """Writes the decided outcomes of jobs, and publishes each one when it is durable."""

    def __init__(self, queue: JobQueue, deadlines: Deadlines, jobs: JobRepository, metrics: GatewayMetrics) -> None:
        self._queue = queue
        self._deadlines = deadlines
        self._jobs = jobs
        self._metrics = metrics
        self._writing = BackgroundTasks("writing of how jobs ended")

    def finish(self, job: Job) -> None:
        """Write and publish the outcome of a job. The outcome must be decided and no attempt may be running."""
        self._queue.remove(job)
        self._deadlines.unwatch(job)
        self._writing.start(self._write(job))

    async def join(self) -> None:
        """Wait until all outcomes are written, or until the repository is closed."""
        await self._writing.join()

    async def _write(self, job: Job) -> None:
        await self._jobs.finish(job)
        if self._jobs.checkpoints is not None:
            self._jobs.checkpoints.forget(job)
        self.count(job)

    def count(self, job: Job) -> None:
        """Log and count a job whose end is durable."""
        conversion.log_ended(job)
        outcome = JobState.Name(job.state).removeprefix("JOB_STATE_").lower()
        reason = job.error.reason_name.lower() if job.error else ""
        self._metrics.job_ended(outcome, seconds=job.age_s, reason=reason, tenant=job.request.tenant)


async def detach_when_idle(jobs: Iterable[Job], *, is_held: Callable[[Job], bool]) -> None:
    """Detach each job from its watchers once no worker runs it, and return when all are detached.

    Args:
        jobs: Jobs that have not ended.
        is_held: Returns whether a job waits for the worker that ran it before a restart. That worker may not come.
    """

    async def detach(job: Job) -> None:
        if not is_held(job):
            await _without_worker(job)
        if job.live:
            job.detach(draining())

    await asyncio.gather(*map(detach, jobs))


def draining() -> Draining:
    """Return the error for callers that watch a job while the gateway stops."""
    return Draining("the gateway is stopping; retry", retry_after_s=1.0)


async def _without_worker(job: Job) -> None:
    """Wait until no worker runs the job and none of its data has to be written."""
    changed = asyncio.Event()
    job.listeners.add(changed.set)
    try:
        while job.live and (job.state == JOB_STATE_RUNNING or not job.open):
            changed.clear()
            await changed.wait()
    finally:
        job.listeners.discard(changed.set)


def failure_after_loss(job: Job, *, max_attempts: int) -> BottegaError | None:
    """Return the error with which a job fails after its worker was lost; None if it is retried."""
    if job.losses.deaths >= _POISON_DEATHS:
        return Poisoned(f"{job.losses.deaths} workers died while they ran this job alone")
    if job.losses.beside_others >= max_attempts:
        return WorkerLost(
            f"{job.losses.beside_others} workers were lost while they ran this job beside others", retry_after_s=1.0
        )
    return None


def failure_after_return(job: Job, error: BottegaError, *, workers: int, by_addon: bool) -> BottegaError | None:
    """Return the error with which a job fails after a worker refused or returned it; None if it is retried.

    Args:
        job: The job.
        error: The error of the worker.
        workers: Number of workers of the job's model.
        by_addon: Whether an add-on was the cause.
    """
    if job.losses.returns < _MAX_RETURNS * max(1, workers):
        return None
    return error if by_addon else NoWorker(f"no worker accepted the job: {error.message}", retry_after_s=1.0)


def unmeetable(estimate_s: float, left_s: float, *, retry_after_s: float | None = None) -> DeadlineUnmeetable:
    """Return the error for a job that would end after its deadline.

    Args:
        estimate_s: Estimated seconds until it would end.
        left_s: Seconds until its deadline.
        retry_after_s: Seconds after which a retry may succeed; None if no retry would.
    """
    return DeadlineUnmeetable(
        f"the job would take about {estimate_s:.1f} s, but its deadline is in {left_s:.1f} s",
        metadata={"estimate_s": f"{estimate_s:.3f}"},
        retry_after_s=retry_after_s,
    )
