"""Tells those who wait where they stand, and by when they may expect their picture.

Decides nothing. A queue and a fleet may be large: everybody's estimate is made once a second, beside the event loop.
"""

from __future__ import annotations

import asyncio

from bottega.gateway.fleet import Fleet
from bottega.gateway.jobs import Job, Standing
from bottega.gateway.queueing import JobQueue
from bottega.gateway.scheduler import Prospect, Seat, Waiting, estimates
from bottega.gateway.seating import Seating


class Standings:
    """Call `tell_all` about once a second, and `tell_last` whenever a job has lined up."""

    def __init__(self, *, fleet: Fleet, queue: JobQueue, seating: Seating) -> None:
        self._fleet = fleet
        self._queue = queue
        self._seating = seating
        self._prospects: dict[str, Prospect] = {}

    def tell_last(self, job: Job) -> None:
        """To a job that has lined up last. Of the others it is known for up to a second how they stood."""
        model = job.bare.model
        if model not in self._prospects:
            waiting, seats = self._view(model)
            prospect = self._prospects[model] = Prospect(seats)
            for other in waiting[:-1]:
                prospect.add(other.demand)
        demand = self._seating.waiting(job, {}).demand
        place = len(self._queue.line(model)) - 1
        job.stand(Standing(place=place, estimate_s=self._prospects[model].end_s(demand)))

    async def tell_all(self) -> None:
        """To everybody who waits."""
        self._prospects.clear()
        for model in self._queue.models():
            waiting, seats = self._view(model)
            ends = await asyncio.to_thread(estimates, waiting, seats)
            by_job = {job.job_id: end for job, end in zip(waiting, ends, strict=True)}
            for place, job in enumerate(self._queue.line(model)):
                if job.job_id in by_job:  # one that came meanwhile has been told
                    job.stand(Standing(place=place, estimate_s=by_job[job.job_id]))

    def _view(self, model: str) -> tuple[list[Waiting], list[Seat]]:
        members = {member.name: member for member in self._fleet.workers(model)}
        waiting = [self._seating.waiting(job, members) for job in self._queue.line(model)]
        return waiting, self._seating.seats(members.values())
