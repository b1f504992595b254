"""When waiting jobs and workers are brought together: at once on what frees one, soon on what comes by the hundred.

Who goes where is the scheduler's matter, and what follows from an attempt's end the foreman's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bottega.gateway.clock import Clock
from bottega.gateway.dispatch.dispatcher import Dispatcher
from bottega.gateway.fleet.members import Member
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.values import QueuePosition
from bottega.gateway.scheduling.policy import assign
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.snapshot import FleetSnapshot
from bottega.v1 import image_pb2

# Between two looks for the sake of progress: a fraction of a turn, which is all that such news can move.
# Every worker tells progress up to ten times a second, and a look costs what the number of workers is.
_PAUSE_S = 0.015
# Those who join a group later hold up those who are in it, by about this factor on what they were expected to take.
_HELD_UP = 1.2


def _ignore(_job: Job, _estimate_s: float) -> None:
    """Until somebody wants to know."""


def _nobody(_member: Member) -> bool:
    """Until somebody is kept back."""
    return False


class Scheduler:
    """The looks at the queue of each model.

    paused: nothing is handed out. on_late: called with a job whose turn it is and that would end, so many seconds from
    now, after its deadline; it is still in the queue, and should leave it. kept_back: says whether a worker gets
    nothing yet.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        dispatcher: Dispatcher,
        queue: JobQueue,
        log: JobRepository,
        seating: FleetSnapshot,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._queue = queue
        self._jobs = log
        self._seating = seating
        self._clock = clock
        self._looked_at: dict[str, float] = {}
        self._due: dict[str, asyncio.TimerHandle] = {}
        self._news_at: dict[str, float] = {}
        self._told: dict[str, int] = {}
        self.paused = False
        self.on_late: Callable[[Job, float], None] = _ignore
        self.kept_back: Callable[[Member], bool] = _nobody

    def at_once(self, model: str, *, free_at: float | None = None) -> None:
        """Hands out what should run now. free_at: since when that is so, on the monotonic clock; None is now."""
        due = self._due.pop(model, None)
        if due is not None:
            due.cancel()
        now = self._clock.monotonic()
        free_at = min(now if free_at is None else free_at, self._news_at.pop(model, now))
        if self._queue.line(model) and not self.paused:
            self._looked_at[model] = now
            self._look(model, free_at)
        else:
            self._looked_at.pop(model, None)
        self._tell_backlog(model)

    def line_up_again(self, job: Job) -> None:
        """One that had its turn waits again, before the others."""
        self._queue.add(job, first=True)
        self.at_once(job.spec.model)
        if job.state == image_pb2.JOB_STATE_QUEUED:
            job.set_queue_position(QueuePosition(place=0, estimate_s=None))

    def soon(self, model: str) -> None:
        """The same within some milliseconds, together with other news of that time."""
        if model in self._due or not self._queue.line(model):
            return
        now = self._clock.monotonic()
        pause_s = self._looked_at.get(model, 0.0) + _PAUSE_S - now
        if pause_s <= 0:
            self.at_once(model)
            return
        self._news_at[model] = now
        self._due[model] = asyncio.get_running_loop().call_later(pause_s, self.at_once, model)

    def welcome(self, member: Member) -> None:
        """Brings a worker that has joined together with those that waited for it."""
        for model in member.models:
            self.at_once(model.name)
        self._tell(member)

    def close(self) -> None:
        """Looks no more."""
        for due in self._due.values():
            due.cancel()
        self._due.clear()

    def _look(self, model: str, free_at: float) -> None:
        members = {member.name: member for member in self._fleet.workers(model) if not self.kept_back(member)}
        waiting = self._seating.candidates(self._queue.line(model), members)
        late: list[tuple[Job, float]] = []
        for assignment in assign(waiting, self._seating.seats(members.values())):
            job = self._jobs.find_live(assignment.job_id)
            assert job is not None
            if assignment.estimate_s is not None and self._late(job, assignment.estimate_s):
                late.append((job, assignment.estimate_s))
                continue
            self._queue.remove(job)
            job.set_queue_position(QueuePosition(place=0, estimate_s=assignment.estimate_s))
            self._dispatcher.run(job, members[assignment.worker], free_at=free_at, alone=assignment.alone)
        for job, estimate_s in late:
            self.on_late(job, estimate_s)

    def _late(self, job: Job, estimate_s: float) -> bool:
        """Whether to begin it would be in vain, while others wait to whom the time may be worth something."""
        if job.deadline is None or len(self._queue.line(job.bare.model)) < 2:
            return False
        return estimate_s * _HELD_UP > job.deadline - self._clock.monotonic()

    def _tell_backlog(self, model: str) -> None:
        backlog = len(self._queue.line(model))
        told = self._told.pop(model, 0)
        if backlog:
            self._told[model] = backlog
        if backlog == told:
            return
        for member in self._fleet.serving(model):
            self._tell(member)

    def _tell(self, member: Member) -> None:
        member.tell_backlog(sum(len(self._queue.line(model.name)) for model in member.models))
