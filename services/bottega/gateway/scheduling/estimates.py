"""Tells those who wait where they stand, and by when they may expect their picture; and whose deadline is too soon.

Decides nothing. A queue and a fleet may be large: everybody's estimate is made once a second, beside the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from bottega.errors import DeadlineUnmeetable
from bottega.gateway.clock import Clock
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.values import QueuePosition
from bottega.gateway.scheduling.policy import QueueForecast, ResourceRequest, WorkerState, estimates
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.snapshot import FleetSnapshot, demand

# Nobody is refused by an older look: jobs that have ended since are still in it. A new one costs some milliseconds.
_FRESH_S = 0.05
# One that is too late by less than this share gets its chance: so well is it known how long steps take.
_TOLERANCE = 0.1
# Who would wait for others is taken only with this share of its time to spare. In a queue as long as deadlines allow
# everybody ends at the last moment, and whatever takes longer than expected makes all of them late.
_SPARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedForecast:
    prospect: QueueForecast
    at: float


class QueueEstimates:
    """Call `tell_all` about once a second, and `tell_last` whenever a job has lined up."""

    def __init__(self, *, fleet: Fleet, queue: JobQueue, seating: FleetSnapshot, clock: Clock) -> None:
        self._fleet = fleet
        self._queue = queue
        self._seating = seating
        self._clock = clock
        self._looks: dict[str, _TimedForecast] = {}

    def tell_last(self, job: Job) -> None:
        """To a job that has lined up last. Of the others it is known for up to a second how they stood."""
        model = job.bare.model
        line = self._queue.line(model)
        look = self._looks.get(model) or self._look(model, but=job)
        asked = demand(job)
        job.set_queue_position(QueuePosition(place=len(line) - 1, estimate_s=look.prospect.end_s(asked)))
        look.prospect.add(asked)

    async def tell_all(self) -> None:
        """To everybody who waits."""
        self._looks.clear()
        for model in self._queue.models():
            jobs = list(self._queue.line(model))
            ends = await asyncio.to_thread(estimates, [demand(job) for job in jobs], self._seats(model))
            by_job = {job.job_id: end for job, end in zip(jobs, ends, strict=True)}
            for place, job in enumerate(self._queue.line(model)):
                if job.job_id in by_job:  # one that came meanwhile has been told
                    job.set_queue_position(QueuePosition(place=place, estimate_s=by_job[job.job_id]))

    def refuse_unmeetable(self, job: Job) -> None:
        """Raises DeadlineUnmeetable for a job that, lined up last, would end after its deadline.

        By what was measured; where nothing was, every job may try.
        """
        if job.deadline is None:
            return
        model, asked = job.bare.model, demand(job)
        left_s = job.deadline - self._clock.monotonic()
        look = self._looks.get(model) or self._look(model)
        estimate_s = _late_s(look.prospect, asked, left_s)
        if estimate_s is not None and look.at < self._clock.monotonic() - _FRESH_S:
            look = self._look(model)
            estimate_s = _late_s(look.prospect, asked, left_s)
        if estimate_s is not None:
            # Coming back helps where others are in the way, and does not where its own steps take too long.
            alone_s = look.prospect.least_s(asked)
            retry_after_s = None if _beyond(alone_s, left_s) else self._queue.retry_after_s()
            raise unmeetable(estimate_s, left_s, retry_after_s=retry_after_s)

    def unmeetable(self, model: str) -> Iterator[tuple[Job, DeadlineUnmeetable]]:
        """Jobs that wait and would be too late even if they ran now and alone, and why they are dropped."""
        jobs = [job for job in self._queue.line(model) if job.deadline is not None]
        if not jobs:
            return
        prospect = QueueForecast(self._seats(model))
        for job in jobs:
            assert job.deadline is not None
            least_s = prospect.least_s(demand(job))
            left_s = job.deadline - self._clock.monotonic()
            if least_s is not None and _beyond(least_s, left_s):
                yield job, unmeetable(least_s, left_s)

    def _look(self, model: str, *, but: Job | None = None) -> _TimedForecast:
        """How it stands now, with everybody who waits, but one."""
        prospect = QueueForecast(self._seats(model))
        for other in self._queue.line(model):
            if other is not but:
                prospect.add(demand(other))
        look = self._looks[model] = _TimedForecast(prospect=prospect, at=self._clock.monotonic())
        return look

    def _seats(self, model: str) -> list[WorkerState]:
        return self._seating.seats(self._fleet.workers(model))


def _late_s(prospect: QueueForecast, asked: ResourceRequest, left_s: float) -> float | None:
    """When a job would end that has `left_s` and would be too late, as far as can be known."""
    estimate_s = prospect.end_s(asked)
    allowed_s = left_s * (1 - _SPARE) if prospect.waiting else left_s * (1 + _TOLERANCE)
    return estimate_s if estimate_s is not None and estimate_s > allowed_s else None


def _beyond(seconds: float | None, left_s: float) -> bool:
    return seconds is not None and seconds > left_s * (1 + _TOLERANCE)


def unmeetable(estimate_s: float, left_s: float, *, retry_after_s: float | None = None) -> DeadlineUnmeetable:
    """The error of a job that would end so many seconds from now, and has so many."""
    return DeadlineUnmeetable(
        f"it would be done in about {estimate_s:.1f} s, and the deadline is in {left_s:.1f} s",
        metadata={"estimate_s": f"{estimate_s:.3f}"},
        retry_after_s=retry_after_s,
    )
