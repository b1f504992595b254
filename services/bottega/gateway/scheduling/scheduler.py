"""The scheduler, which assigns the jobs of a model's queue to workers whenever something changes.

It schedules at once when a worker becomes free or a job arrives, and some milliseconds later after frequent events,
such as progress. The policy decides which worker gets which job.

After a restart of the gateway, jobs continue on the workers that still run their attempts. Such a job is held for a
while, so that its worker can join again. The scheduler lists the attempts of every worker that joins. Current attempts
continue, and outdated ones are stopped. A job that no worker claims in time is queued again, before the others. If its
worker joins later, its attempt still continues unless another one was started.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

from bottega.addons.interface.views import Member
from bottega.background_tasks import BackgroundTasks
from bottega.clocks import Clock
from bottega.errors import BottegaError
from bottega.gateway.dispatch.connection import WorkerConnection
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
from bottega.v1 import worker_pb2
from bottega.v1.image_pb2 import JOB_STATE_QUEUED

# Seconds. A timer that is later expired while this process was stalled, so that no worker could reconnect.
_LATE_S = 0.5

_log = logging.getLogger(__name__)
# Seconds between two rounds because of progress: a fraction of a forward pass, in which nothing changes. Workers report
# progress up to ten times a second, and the cost of a round grows with the number of workers.
_PAUSE_S = 0.015
# Jobs that join a batch later make the jobs in it take about this many times as long.
_HELD_UP = 1.2


class Scheduler:
    """Assigns the jobs of a queue to workers.

    It assigns nothing while `draining`, nor while the disk cannot be written, because results could not be stored.
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
        """Run one round of scheduling for a model.

        Args:
            model: Model whose queue is scheduled.
            free_at: Time since which the jobs could have run, on the monotonic clock; None means now.
        """
        due = self._due.pop(model, None)
        if due is not None:
            due.cancel()
        now = self._clock.monotonic()
        free_at = min(now if free_at is None else free_at, self._changed_at.pop(model, now))
        if self._queue.waiting(model) and self._storage.trouble is None and not self.draining:
            self._looked_at[model] = now
            while self._hand_out(model, free_at):
                free_at = now  # dropped jobs left places for others
        else:
            self._looked_at.pop(model, None)
        self._report_backlog(model)

    def schedule_all(self) -> None:
        """Run one round of scheduling for every model."""
        for model in self._queue.models():
            self.schedule(model)

    def schedule_soon(self, model: str) -> None:
        """Run a round of scheduling within some milliseconds. Further calls until then are combined with it."""
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
        """Queue a job again, before the others, because its attempt failed. After too many attempts, fail it."""
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
        """Assign no jobs to a worker until `add_worker` or `stop_holding_back` is called."""
        self._held_back.add(member)

    def stop_holding_back(self, member: Member) -> None:
        """Allow a worker to get jobs again, from the next round on."""
        self._held_back.discard(member)

    def add_worker(self, member: Member) -> None:
        """Assign waiting jobs to a worker that has joined."""
        self._held_back.discard(member)
        for model in member.models:
            self.schedule(model.name)
        self._report_backlog_to(member)

    def close(self) -> None:
        """Stop scheduling."""
        for due in self._due.values():
            due.cancel()
        self._due.clear()

    def _hand_out(self, model: str, free_at: float) -> bool:
        """Run one round of the policy. Return whether a job was dropped because it would end after its deadline."""
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
        """Return how many more jobs of a tenant may start, over all models; None means no bound."""
        most = self._queue.terms.quotas(tenant).concurrent
        return most - self._dispatcher.running_of(tenant) if most else None

    def _is_late(self, job: Job, estimate_s: float, left_s: float) -> bool:
        """Return whether a job would end after its deadline if it started, while other jobs could use the time."""
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
        """Return how many jobs wait for a member's models. It is bounded, because each new value wakes a stream."""
        return min(sum(self._queue.waiting(model) for model in member.served), MAX_BACKLOG)


class AttemptRecovery:
    """Recovers the jobs that were running when the gateway was restarted.

    Args:
        hold_s: Seconds for which a job waits for its worker to reconnect.
    """

    def __init__(
        self, dispatcher: Dispatcher, scheduler: Scheduler, queue: JobQueue, jobs: JobRepository, *, hold_s: float
    ) -> None:
        self._dispatcher = dispatcher
        self._scheduler = scheduler
        self._queue = queue
        self._jobs = jobs
        self._hold_s = hold_s
        self._held: dict[str, Job] = {}
        # jobs that were queued again, with the attempt number that no worker claimed
        self._unclaimed: dict[Job, int] = {}
        self._expiry: asyncio.TimerHandle | None = None
        self._listing = BackgroundTasks("lists of the attempts of workers")

    def restore(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs from before a restart, oldest first, but hold those that were running."""
        for job in jobs:
            if job.state == JOB_STATE_QUEUED:
                self._queue.add(job)
                # Its watchers see its place at once, and estimates within a second.
                job.set_queue_position(self._queue.place(job))
            else:
                self._held[job.job_id] = job
        if self._held:
            self._expire_later()

    def is_held(self, job: Job) -> bool:
        """Return whether the job waits for its worker to reconnect."""
        return job.open and job.job_id in self._held

    def add_worker(self, member: Member) -> None:
        """Ask a worker that has joined for its attempts.

        It gets jobs at once, or after its answer if it may run jobs that are held.
        """
        self._unclaimed = {job: number for job, number in self._unclaimed.items() if self._is_unclaimed(job)}
        hold_back = bool(self._unclaimed) or any(map(self.is_held, self._held.values()))
        if hold_back:
            self._scheduler.hold_back(member)
        else:
            self._scheduler.add_worker(member)
        self._listing.start(self._list_attempts(member, held_back=hold_back))

    def stop_stale_attempts(self, member: Member) -> None:
        """Stop a worker's outdated attempts. For example, it was frozen while its jobs were retried elsewhere."""
        connection = self._dispatcher.connections.get(member)
        for running in member.load.running if connection else ():
            job = self._jobs.find_live(running.attempt.job_id)
            if job is not None:
                stale = running.attempt.number < job.number  # a later one may have to be claimed
            else:
                stale = self._jobs.restored and not self._dispatcher.has_completed(running.attempt)
            if stale and connection:
                connection.stop_stale_attempt(running.attempt)

    async def close(self) -> None:
        """Hold no more jobs, and stop listing attempts."""
        self._held.clear()
        self._unclaimed.clear()
        if self._expiry is not None:
            self._expiry.cancel()
        await self._listing.cancel()

    async def _list_attempts(self, member: Member, *, held_back: bool) -> None:
        if not self._jobs.restored:
            return  # all workers are listed when jobs are restored
        try:
            await self._claim_all(member)
        finally:
            self._scheduler.stop_holding_back(member)
        if held_back:
            self._scheduler.add_worker(member)

    async def _claim_all(self, member: Member) -> None:
        connection = self._dispatcher.connections.get(member)
        if connection is None:
            return
        try:
            for summary in await connection.list_attempts():
                if self._dispatcher.connections.get(member) is connection:  # it may be lost by now
                    self._claim(connection, summary.attempt)
        except BottegaError as error:
            _log.warning(
                "the attempts of a worker could not be listed", extra={"member": member.name, "text": error.message}
            )

    def _claim(self, connection: WorkerConnection, attempt: worker_pb2.AttemptId) -> None:
        job, worker = self._jobs.find_live(attempt.job_id), connection.member.name
        if job is not None and self._counts(job, attempt.number) and job.adopt_attempt(worker, attempt.number):
            self._held.pop(job.job_id, None)
            self._queue.remove(job)
            _log.info("attempt adopted", extra={"job_id": job.job_id, "request_id": job.log_id, "worker": worker})
            self._dispatcher.adopt_attempt(job, connection)
            self._jobs.save(job)
        elif job is None or not job.open or job.number != attempt.number:
            connection.stop_attempt(attempt)

    def _counts(self, job: Job, number: int) -> bool:
        """Return whether an attempt is current. A higher number than the stored one began just before the restart."""
        if self.is_held(job):
            return True
        return job.state == JOB_STATE_QUEUED and (number > job.number or self._is_unclaimed(job))

    def _is_unclaimed(self, job: Job) -> bool:
        """Return whether the job was held and queued again, and no new attempt has started since."""
        return job.open and job.state == JOB_STATE_QUEUED and self._unclaimed.get(job) == job.number

    def _expire_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_at(loop.time() + self._hold_s, self._expire, loop.time() + self._hold_s)

    def _expire(self, due: float) -> None:
        if asyncio.get_running_loop().time() - due > _LATE_S:
            self._expire_later()
            return
        held, self._held = list(self._held.values()), {}
        for job in reversed(held):
            if job.requeue_returned(job.number):
                self._unclaimed[job] = job.number
                self._scheduler.requeue(job)
