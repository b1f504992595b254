"""Brings waiting jobs and workers together, from acceptance to the end of a job.

Takes jobs in, hears who joins and who is lost, and puts the parts together that do the rest: who goes where
(matching.py), what a lost attempt means (aftermath.py), who has waited too long (rounds.py), how a job ends
(endings.py). Knows no wire and no contents of jobs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from bottega.errors import DeadlinePassed, Draining
from bottega.gateway.addons.controlnets.placement import ControlNetPlacement
from bottega.gateway.addons.controlnets.prefetch import AHEAD, ControlNetPrefetcher
from bottega.gateway.addons.loras.costs import LoraSizes
from bottega.gateway.clock import Clock
from bottega.gateway.dispatch.dispatcher import Dispatcher
from bottega.gateway.fleet.members import Member
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs import log_lines
from bottega.gateway.jobs.deadlines import Deadlines
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.values import QueuePosition
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.scheduling.estimates import QueueEstimates, unmeetable
from bottega.gateway.scheduling.finishing import JobFinisher
from bottega.gateway.scheduling.outcomes import AttemptOutcomes
from bottega.gateway.scheduling.periodic import PeriodicChecks
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.recovery import AttemptRecovery
from bottega.gateway.scheduling.scheduler import Scheduler
from bottega.gateway.scheduling.snapshot import FleetSnapshot
from bottega.v1 import image_pb2


class JobController:
    """Observes the fleet; `start` before the first job, `stop` after the last.

    patience_s: how long the jobs of an earlier life wait for a worker of their model to join at all.
    hold_s: how long those of them that were running wait for the worker that had them.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        dispatcher: Dispatcher,
        placement: ControlNetPlacement,
        prefetcher: ControlNetPrefetcher,
        lora_sizes: LoraSizes,
        queue: JobQueue,
        log: JobRepository,
        metrics: GatewayMetrics,
        max_attempts: int,
        patience_s: float,
        hold_s: float,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._prefetcher = prefetcher
        self._seating = FleetSnapshot(dispatcher, placement, log, lora_sizes)
        self._matching = Scheduler(
            fleet=fleet, dispatcher=dispatcher, queue=queue, log=log, seating=self._seating, clock=clock
        )
        self._matching.on_late = self._drop_late
        self._standings = QueueEstimates(fleet=fleet, queue=queue, seating=self._seating, clock=clock)
        self._adoption = AttemptRecovery(
            dispatcher=dispatcher,
            queue=queue,
            log=log,
            hold_s=hold_s,
            unclaimed=lambda job: self._aftermath.wait_again(job),
        )
        self._matching.kept_back = self._adoption.awaits
        self._deadlines = Deadlines(clock)
        self._endings = JobFinisher(
            queue=queue,
            dispatcher=dispatcher,
            adoption=self._adoption,
            deadlines=self._deadlines,
            matching=self._matching,
            log=log,
            metrics=metrics,
        )
        self._aftermath = AttemptOutcomes(
            fleet=fleet,
            placement=placement,
            queue=queue,
            matching=self._matching,
            deadlines=self._deadlines,
            endings=self._endings,
            log=log,
            metrics=metrics,
            max_attempts=max_attempts,
        )
        self._rounds = PeriodicChecks(
            fleet=fleet,
            queue=queue,
            matching=self._matching,
            standings=self._standings,
            placement=placement,
            prefetcher=prefetcher,
            fail=self._endings.fail,
            patience_s=patience_s,
            clock=clock,
        )
        self._queue = queue
        self._jobs = log
        self._metrics = metrics
        self._clock = clock
        self.draining = False
        fleet.observer = self
        dispatcher.observer = self._aftermath
        metrics.watch_queue(lambda: len(queue))

    def start(self) -> None:
        """Begins to watch leases and the queue."""
        self._rounds.start()

    def restore(self, jobs: Sequence[Job], *, seconds: float = 0.0) -> None:
        """Goes on with the jobs of an earlier life: the queue as it was, and what was running when its worker is back.

        Those that end with their callers end: these went with that life.

        seconds: that it took to read them, for the log.
        """
        orphans = [job for job in jobs if job.open and job.ends_with_caller]
        kept = [job for job in jobs if job.open and not job.ends_with_caller]
        running = [job for job in kept if job.state == image_pb2.JOB_STATE_RUNNING]
        for job in jobs:
            if not job.open:
                self._endings.decided(job)  # it cannot be drawn any more
        for job in kept:
            self._deadlines.watch(job, self._pass_deadline)
            if job.state == image_pb2.JOB_STATE_QUEUED:
                self._queue.add(job)
                # Who follows it hears at once where it stands; when it will be done is told to all in turn.
                job.set_queue_position(QueuePosition(place=len(self._queue.line(job.bare.model)) - 1, estimate_s=None))
        self._adoption.hold(running)
        self._rounds.be_patient()
        if jobs:
            log_lines.restored(len(jobs), len(running), seconds)
        for member in self._fleet.members():
            if member.is_worker:
                self._adoption.ask(member, then=self._matching.welcome)
        for job in orphans:
            self.abandon(job, "its only caller went with the gateway that had the call")

    def pause(self, paused: bool) -> None:
        """Hands nothing out, or goes on: what cannot be stored afterwards shall not be drawn."""
        self._matching.paused = paused or self.draining
        if not self._matching.paused:
            for model in self._queue.models():
                self._matching.at_once(model)

    async def finish(self) -> None:
        """Takes no new jobs and returns when those that run have ended; the others are for a later life.

        Whoever follows one of those is sent away, and may follow it there. So is, when this is cancelled, whoever
        follows one that still runs; its worker goes on with it.
        """
        self.draining = self._matching.paused = True
        why = Draining("the gateway is stopping; ask again", retry_after_s=1.0)
        try:
            await asyncio.gather(*(self._see_off(job, why) for job in self._jobs.live()))
        finally:
            for job in list(self._jobs.live()):
                job.detach(why)
            self._dispatcher.let_go()
            self._fleet.close()

    async def _see_off(self, job: Job, why: Draining) -> None:
        """Sends away who follows the job, as soon as it cannot end here: at once where no worker has it."""
        if not self._adoption.holds(job):
            await _out_of_hand(job)
        if job.live:
            job.detach(why)

    async def stop(self) -> None:
        """Ends every attempt."""
        await self._rounds.stop()
        self._deadlines.close()
        self._matching.close()
        await self._adoption.close()
        await self._prefetcher.close()
        await self._dispatcher.close()
        await self._jobs.close()
        await self._endings.close()

    @property
    def sound(self) -> bool:
        """Whether fleet and queue are looked after."""
        return self._rounds.sound

    def refuse_unmeetable(self, job: Job) -> None:
        """Raises DeadlineUnmeetable for a job whose deadline is before its end, by what was measured."""
        self._standings.refuse_unmeetable(job)

    def submit(self, job: Job) -> None:
        """Takes a job, which is durable: it waits or runs. The queue's bounds were checked."""
        log_lines.accepted(job)
        if self.draining:
            job.detach(Draining("the gateway is stopping; ask again", retry_after_s=1.0))
            return
        self._queue.add(job)
        self._deadlines.watch(job, self._pass_deadline)
        self._matching.at_once(job.spec.model, free_at=job.queued_at)
        if job.state == image_pb2.JOB_STATE_QUEUED:
            self._standings.tell_last(job)
            if len(self._queue.line(job.bare.model)) <= AHEAD:
                self._prefetcher.ahead([job])

    def show(self, job: Job) -> None:
        """Somebody wants previews of the job."""
        if job.live:
            self._dispatcher.show(job)

    def extend(self, job: Job, deadline: float | None) -> None:
        """Somebody else wants the job, and until then (monotonic; None: without bound). It never gets less time."""
        if self._jobs.find_live(job.job_id) is job and job.extend_deadline(deadline):
            self._deadlines.watch(job, self._pass_deadline)
            self._jobs.save(job)

    def cancel(self, job: Job) -> None:
        """Cancels a job; one that has ended stays as it is."""
        self._endings.cancel(job)

    async def cancel_for_good(self, job: Job) -> None:
        """The same; returns when it is written. Raises StorageUnavailable when the disk cannot take it now.

        Where the job can only be looked at, nothing is decided: whoever hears no must not be obeyed later.
        """
        self._jobs.check_changeable(job)
        self.cancel(job)
        await self._jobs.wait_finished(job)

    def abandon(self, job: Job, why: str = "its only caller has gone") -> None:
        """The only caller has gone, which by the deadline is its passing; a job that has ended stays as it is."""
        if self._deadlines.has_passed(job):
            self._pass_deadline(job)
        else:
            self._endings.cancel(job, why)

    # What the fleet tells.

    def member_joined(self, member: Member) -> None:
        """See FleetObserver."""
        if member.is_worker:
            self._dispatcher.open(member)
            self._adoption.ask(member, then=self._matching.welcome)
        self._count_members()

    def member_changed(self, member: Member) -> None:
        """See FleetObserver."""
        if not member.connected:
            self._count_members()
        self._stop_stale_attempts(member)
        for model in [model.name for model in member.models] if member.is_worker else self._queue.models():
            self._matching.soon(model)

    def member_lost(self, member: Member) -> None:
        """See FleetObserver."""
        self._count_members()
        self._dispatcher.lose(member)
        self._prefetcher.lose(member)
        self._seating.forget(member)

    def _stop_stale_attempts(self, member: Member) -> None:
        """Frees a worker of attempts that count no more, such as after it was frozen for a while."""
        for running in member.load.running:
            job = self._jobs.find_live(running.attempt.job_id)
            number = running.attempt.number
            if job is not None:
                stale = number < job.number  # a later one than ours is for the adoption to judge
            else:
                stale = self._jobs.restored and not self._aftermath.has_completed(running.attempt)
            if stale:
                self._dispatcher.stop_stale_attempt(member, running.attempt)

    def _drop_late(self, job: Job, estimate_s: float) -> None:
        assert job.deadline is not None
        self._endings.fail(job, unmeetable(estimate_s, job.deadline - self._clock.monotonic()))

    def _pass_deadline(self, job: Job) -> None:
        where = "in the queue" if job.state == image_pb2.JOB_STATE_QUEUED else "while it was drawn"
        self._endings.fail(job, DeadlinePassed(f"the deadline passed {where}"))

    def _count_members(self) -> None:
        self._metrics.members(Counter(member.registration.kind for member in self._fleet.members()))


async def _out_of_hand(job: Job) -> None:
    """Returns when the job is with no worker and nothing of it has to be written."""
    changed = asyncio.Event()
    job.listeners.add(changed.set)
    try:
        while job.live and (job.state == image_pb2.JOB_STATE_RUNNING or not job.open):
            changed.clear()
            await changed.wait()
    finally:
        job.listeners.discard(changed.set)
