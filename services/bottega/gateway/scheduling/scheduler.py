"""The scheduler, which looks at the queue of a model whenever something changes and hands its jobs to workers.

It looks at once after events that free a worker or bring a job, and a moment later after frequent ones, such as
progress. The policy decides which job goes where.
"""

from __future__ import annotations

import asyncio
import math

from bottega.addons.interface.member import Member
from bottega.clocks import Clock
from bottega.gateway.dispatch.dispatcher import Dispatcher
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.scheduling.outcomes import JobFinisher, unmeetable
from bottega.gateway.scheduling.policy import RunningShares, assign
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.snapshot import FleetSnapshot
from bottega.planning import MAX_BACKLOG
from bottega.v1.image_pb2 import JOB_STATE_QUEUED

# Time between two looks because of progress: a fraction of a turn, within which nothing changes. Every worker reports
# progress up to ten times a second, and the cost of a look grows with the number of workers.
_PAUSE_S = 0.015
# Jobs that join a group later lengthen those in it by about this factor.
_HELD_UP = 1.2


class Scheduler:
    """The scheduler, which hands out the jobs of a queue.

    It hands out nothing while the disk cannot be written, because results could not be stored, nor while `draining`.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        queue: JobQueue,
        snapshot: FleetSnapshot,
        jobs: JobRepository,
        storage: Storage,
        dispatcher: Dispatcher,
        finisher: JobFinisher,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._queue = queue
        self._snapshot = snapshot
        self._jobs = jobs
        self._storage = storage
        self._dispatcher = dispatcher
        self._finisher = finisher
        self._clock = clock
        self._held_back: set[Member] = set()
        self._looked_at: dict[str, float] = {}
        self._due: dict[str, asyncio.TimerHandle] = {}
        self._changed_at: dict[str, float] = {}
        self._reported: dict[str, int] = {}
        self.draining = False

    def schedule(self, model: str, *, free_at: float | None = None) -> None:
        """Hand out what should run now.

        Args:
            model: Model whose queue is looked at.
            free_at: Since when the jobs could run, on the monotonic clock; None means now.
        """
        due = self._due.pop(model, None)
        if due is not None:
            due.cancel()
        now = self._clock.monotonic()
        free_at = min(now if free_at is None else free_at, self._changed_at.pop(model, now))
        if self._queue.waiting(model) and self._storage.trouble is None and not self.draining:
            self._looked_at[model] = now
            while self._hand_out(model, free_at):
                free_at = now  # jobs that were dropped left places
        else:
            self._looked_at.pop(model, None)
        self._report_backlog(model)

    def schedule_all(self) -> None:
        """Hand out what should run now of every model."""
        for model in self._queue.models():
            self.schedule(model)

    def schedule_soon(self, model: str) -> None:
        """Hand out what should run within some milliseconds, together with other changes of that time."""
        if model in self._due or not self._queue.waiting(model):
            return
        now = self._clock.monotonic()
        pause_s = self._looked_at.get(model, 0.0) + _PAUSE_S - now
        if pause_s <= 0:
            self.schedule(model)
            return
        self._changed_at[model] = now
        self._due[model] = asyncio.get_running_loop().call_later(pause_s, self.schedule, model)

    def requeue(self, job: Job) -> None:
        """Queue a job whose attempt failed again, before the others; after too many attempts fail it."""
        if job.fail_if_exhausted():
            self._finisher.finish(job)
            self.schedule(job.bare.model)
            return
        self._jobs.save(job)
        self._queue.add(job, first=True)
        self.schedule(job.spec.model)
        if job.state == JOB_STATE_QUEUED:
            job.set_queue_position(0)

    def hold_back(self, member: Member) -> None:
        """Give a worker nothing until `add_worker` or `stop_holding_back`."""
        self._held_back.add(member)

    def stop_holding_back(self, member: Member) -> None:
        """Let a worker get jobs from the next look at the queue on."""
        self._held_back.discard(member)

    def add_worker(self, member: Member) -> None:
        """Hand a worker that has joined what waited for it."""
        self._held_back.discard(member)
        for model in member.models:
            self.schedule(model.name)
        self._report_backlog_to(member)

    def close(self) -> None:
        """Stop looking at queues."""
        for due in self._due.values():
            due.cancel()
        self._due.clear()

    def _hand_out(self, model: str, free_at: float) -> bool:
        """Run one round of the policy. Return whether a job was dropped because its turn came too late."""
        members = {m.name: m for m in self._fleet.workers(model) if m not in self._held_back}
        shares = RunningShares(
            self._dispatcher.running(model), self._queue.tenants(model), self._queue.terms.weight, self._may_begin
        )
        pending = self._snapshot.pending(self._queue.line(model), members, shares)
        late: list[Job] = []
        workers, waiting = self._snapshot.workers(members.values()), self._queue.waiting(model)
        for assignment in assign(pending, workers, waiting=waiting, contended=shares.contended):
            job = self._jobs.find_live(assignment.job_id)
            assert job is not None
            left_s = math.inf if job.deadline is None else job.deadline - self._clock.monotonic()
            if assignment.estimate_s is not None and self._is_late(job, assignment.estimate_s, left_s):
                late.append(job)
                job.fail(unmeetable(assignment.estimate_s, left_s))
                continue
            self._queue.begin(job)
            job.set_queue_position(0, assignment.estimate_s)
            worker = members[assignment.worker]
            self._dispatcher.start_attempt(job, worker, free_at=free_at, exclusive=assignment.exclusive)
        for job in late:
            self._finisher.finish(job)
        return bool(late)

    def _may_begin(self, tenant: str) -> int | None:
        """Return how many more jobs of a tenant may run, of all models; None means no bound."""
        most = self._queue.terms.quotas(tenant).concurrent
        return most - self._dispatcher.running_of(tenant) if most else None

    def _is_late(self, job: Job, estimate_s: float, left_s: float) -> bool:
        """Return whether a job would end too late if it began, while other jobs could use the time."""
        return self._queue.waiting(job.bare.model) > 1 and estimate_s * _HELD_UP > left_s

    def _report_backlog(self, model: str) -> None:
        backlog = min(self._queue.waiting(model), MAX_BACKLOG)
        reported = self._reported.pop(model, 0)
        if backlog:
            self._reported[model] = backlog
        if backlog == reported:
            return
        # Most workers serve the same models.
        backlogs: dict[frozenset[str], int] = {}
        for member in self._fleet.serving(model):
            if member.served not in backlogs:
                backlogs[member.served] = self._backlog_of(member)
            member.report_backlog(backlogs[member.served])

    def _report_backlog_to(self, member: Member) -> None:
        member.report_backlog(self._backlog_of(member))

    def _backlog_of(self, member: Member) -> int:
        """Return how many jobs wait for a member's models, as far as it matters: each report wakes a stream."""
        return min(sum(self._queue.waiting(model) for model in member.served), MAX_BACKLOG)
