"""Where each pending job is in its queue, when it is expected to complete, and whether its deadline leaves slack.

A queue and a fleet may be large: the estimates of all jobs are made once a second, beside the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bottega.clocks import Clock
from bottega.errors import DeadlineUnmeetable
from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.outcomes import unmeetable
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.snapshot import FleetSnapshot
from bottega.gateway.scheduling.worker_plan import WorkerPlan
from bottega.gateway.scheduling.worker_state import ResourceRequest, WorkerState
from bottega.v1.image_pb2 import Priority

# Nobody is refused by an older forecast: jobs that have ended since are still in it. A new one costs milliseconds.
_FRESH_S = 0.05
# One that is too late by less than this share gets its chance: so well is it known how long steps take.
_TOLERANCE = 0.1
# Forecasts of one tenant and model, each of another kind of jobs.
_KINDS = 16
# A job that would wait for others is admitted only with this share of its time to spare. In a queue as long as
# deadlines allow every job ends at the last moment, and one that takes longer than expected makes all of them late.
_SPARE = 0.3


class QueueForecast:
    """When each pending job would complete if nobody came any more: the least loaded worker takes the next one.

    For queue positions and deadlines; it assigns nothing.
    """

    def __init__(self, workers: Sequence[WorkerState]) -> None:
        measured = not all(worker.unmeasured for worker in workers)
        self._plans = [WorkerPlan(worker) for worker in workers] if measured else []
        self._loads_s = [plan.load_s for plan in self._plans]
        self._lines: list[list[int]] = [[] for _ in self._plans]
        self._size = 0

    @property
    def size(self) -> int:
        """How many jobs were added."""
        return self._size

    def add(self, request: ResourceRequest) -> None:
        """Adds one job, last."""
        if self._plans:
            least = self._least_loaded()
            self._loads_s[least] += self._plans[least].state.alone_s(request)
            self._plans[least].add(request, bound=False)
            self._lines[least].append(self._size)
        self._size += 1

    def next_completion_s(self, request: ResourceRequest) -> float | None:
        """Expected seconds until a job that came now would complete. None while nothing was measured."""
        if not self._plans:
            return None
        plan = self._plans[self._least_loaded()]
        return plan.completions_s(request)[-1] + plan.state.fixed_s

    def least_s(self, request: ResourceRequest) -> float | None:
        """Seconds of a job on the fastest worker and alone. None while that is not measured."""
        if not self._plans or any(plan.unmeasured(request) for plan in self._plans):
            return None
        return min(plan.state.alone_s(request) + plan.state.fixed_s for plan in self._plans)

    def completions_s(self) -> list[float | None]:
        """Expected seconds until each of the added jobs completes."""
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
    """Expected seconds until each of the pending jobs completes; None while nothing was measured."""
    queue = QueueForecast(workers)
    for request in requests:
        queue.add(request)
    return queue.completions_s()


_Kind = tuple[ResourceRequest, "Priority.ValueType"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedForecast:
    """Of the jobs that are served before the next one of a kind."""

    forecast: QueueForecast
    made_at: float


class QueueEstimates:
    """Call `publish_all` about once a second, and `publish` whenever a job has lined up."""

    def __init__(self, queue: JobQueue, snapshot: FleetSnapshot, clock: Clock) -> None:
        self._queue = queue
        self._snapshot = snapshot
        self._clock = clock
        # By model and tenant, and by what a job needs and its priority: those that have these in common are served in
        # the order in which they come.
        self._forecasts: dict[tuple[str, str], dict[_Kind, _TimedForecast]] = {}

    def publish(self, job: Job) -> None:
        """Sets the position of a job that has just lined up, by a forecast that is at most a second old."""
        request = self._snapshot.resource_request(job)
        timed = self._known_forecast(job, request) or self._forecast(job, request)
        estimate_s = timed.forecast.next_completion_s(request)
        job.set_queue_position(self._queue.place(job), estimate_s)
        # Also to those of kinds that are served before it, which are told a little too much until the next second.
        # Nobody is refused for it: a forecast that is too late is made anew, see check_deadline.
        for other in self._forecasts[_whose(job)].values():
            other.forecast.add(request)

    async def publish_all(self) -> None:
        """Sets the position of every job in the queue."""
        self._forecasts.clear()
        for model in self._queue.models():
            jobs = list(self._queue.line(model))
            requests = [self._snapshot.resource_request(job) for job in jobs]
            ends = await asyncio.to_thread(forecast, requests, self._snapshot.workers_of(model))
            by_job = {job.job_id: end for job, end in zip(jobs, ends, strict=True)}
            for place, job in enumerate(self._queue.line(model)):
                if job.job_id in by_job:  # one that came meanwhile has its position
                    job.set_queue_position(place, by_job[job.job_id])

    def check_deadline(self, job: Job) -> None:
        """Raises DeadlineUnmeetable for a job that, lined up now, would end after its deadline.

        By what was measured; where nothing was, every job may try.
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
        # Coming back helps where others are in the way, and does not where its own steps take too long.
        hopeless = _too_long(timed.forecast.least_s(request), left_s)
        raise unmeetable(estimate_s, left_s, retry_after_s=None if hopeless else self._queue.retry_after_s())

    def unmeetable(self, model: str) -> Iterator[tuple[Job, DeadlineUnmeetable]]:
        """Jobs that wait and would be too late even if they ran now and alone, and why they are dropped."""
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
        """With every job that is served before this one, or before the next one of its kind."""
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
    """Its model and tenant."""
    return job.bare.model, job.request.tenant


def _fits(forecast: QueueForecast, request: ResourceRequest, left_s: float) -> bool:
    """Whether a job that has `left_s` would be done in time, as far as can be known."""
    estimate_s = forecast.next_completion_s(request)
    allowed_s = left_s * (1 - _SPARE) if forecast.size else left_s * (1 + _TOLERANCE)
    return estimate_s is None or estimate_s <= allowed_s


def _too_long(seconds: float | None, left_s: float) -> bool:
    return seconds is not None and seconds > left_s * (1 + _TOLERANCE)
