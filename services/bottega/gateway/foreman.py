"""Brings waiting jobs and workers together, from acceptance to the end of a job.

Holds the rules of what follows what: who is next, what a loss means, when a job has waited too long. Knows no
wire and no contents of jobs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Sequence

from bottega.errors import BottegaError, DeadlinePassed, Draining, NoControlNet, NoWorker, Poisoned, WorkerLost
from bottega.gateway import log_lines
from bottega.gateway.adoption import Adoption
from bottega.gateway.attempts import died_alone, is_death
from bottega.gateway.clock import Clock
from bottega.gateway.dispatch import Dispatcher
from bottega.gateway.fleet import Fleet
from bottega.gateway.job_log import JobLog
from bottega.gateway.jobs import MOST_ATTEMPTS, Job, Picture, Standing
from bottega.gateway.matching import Matching
from bottega.gateway.members import Member
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.placement import Placement
from bottega.gateway.prefetch import Prefetcher
from bottega.gateway.queueing import JobQueue
from bottega.gateway.seating import Seating
from bottega.gateway.standings import Standings, unmeetable
from bottega.v1 import image_pb2
from bottega.v1.fleet_pb2 import ServiceKind
from bottega.v1.generation_pb2 import Provenance
from bottega.v1.image_pb2 import JobState

# A tick later than this says that this process, not its members, was silent.
_LATE_S = 0.5
_TICK_S = 0.1
_TICKS_PER_SECOND = 10
# Rounds that failed within so many seconds, after which the gateway says that it does not serve. The queue has a round
# a second.
_MOST_FAULTS = 3
_FAULTS_S = 10.0
# A caller's clock and ours agree on a deadline up to the time on the wire, and gRPC rounds.
_AT_DEADLINE_S = 0.1
# How often each worker of a model may not take a job, or give it back: with its rests that is half a minute.
_MOST_RETURNS = 60
# Attempts that have just completed, which reports on their way may still tell of.
_JUST_COMPLETED = 256
# The first jobs of a line, whose ControlNets are loaded ahead: those behind them would drive these out again.
_AHEAD = 8
# design.md: two workers that died of a job, each running it alone, make it poison.
_POISONOUS = 2

_log = logging.getLogger(__name__)


class Foreman:
    """Observes fleet and dispatcher; `start` before the first job, `stop` after the last.

    patience_s: how long the jobs of an earlier life wait for a worker of their model to join at all.
    hold_s: how long those of them that were running wait for the worker that had them.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        dispatcher: Dispatcher,
        placement: Placement,
        prefetcher: Prefetcher,
        queue: JobQueue,
        log: JobLog,
        metrics: GatewayMetrics,
        max_attempts: int,
        patience_s: float,
        hold_s: float,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._placement = placement
        self._prefetcher = prefetcher
        self._seating = Seating(dispatcher, placement, log)
        self._matching = Matching(
            fleet=fleet, dispatcher=dispatcher, queue=queue, log=log, seating=self._seating, clock=clock
        )
        self._matching.on_late = self._drop_late
        self._standings = Standings(fleet=fleet, queue=queue, seating=self._seating, clock=clock)
        self._adoption = Adoption(
            dispatcher=dispatcher, queue=queue, log=log, hold_s=hold_s, line_up=self._line_up_again
        )
        self._matching.kept_back = self._adoption.awaits
        self._queue = queue
        self._jobs = log
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._patience_s = patience_s
        self._patient_until = 0.0
        self._clock = clock
        self._ending: set[asyncio.Task[None]] = set()
        self._completed: deque[tuple[str, int]] = deque(maxlen=_JUST_COMPLETED)
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._faults: deque[float] = deque(maxlen=_MOST_FAULTS)
        self.draining = False
        fleet.observer = self
        dispatcher.observer = self
        log.on_found = self.submit
        metrics.watch_queue(lambda: len(queue))

    def start(self) -> None:
        """Begins to watch leases and the queue."""
        self._ticking = asyncio.create_task(self._tick())

    def restore(self, jobs: Sequence[Job], *, seconds: float = 0.0) -> None:
        """Goes on with the jobs of an earlier life: the queue as it was, and what was running when its worker is back.

        seconds: that it took to read them, for the log.
        """
        running = [job for job in jobs if job.open and job.state == image_pb2.JOB_STATE_RUNNING]
        for job in jobs:
            if not job.open:
                self._decided(job)  # it cannot be drawn any more
                continue
            self._set_deadline(job)
            if job.state == image_pb2.JOB_STATE_QUEUED:
                self._queue.add(job)
                # Who follows it hears at once where it stands; when it will be done is told to all in turn.
                job.stand(Standing(place=len(self._queue.line(job.bare.model)) - 1, estimate_s=None))
        self._adoption.hold(running)
        self._patient_until = self._clock.monotonic() + self._patience_s
        if jobs:
            log_lines.restored(len(jobs), len(running), seconds)
        for member in self._fleet.members():
            if member.is_worker:
                self._adoption.ask(member, then=self._matching.welcome)

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
                job.leave(why)
            self._dispatcher.let_go()
            self._fleet.close()

    async def _see_off(self, job: Job, why: Draining) -> None:
        """Sends away who follows the job, as soon as it cannot end here: at once where no worker has it."""
        if not self._adoption.holds(job):
            await _out_of_hand(job)
        if job.live:
            job.leave(why)

    async def stop(self) -> None:
        """Ends every attempt."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        for deadline in self._deadlines.values():
            deadline.cancel()
        self._matching.close()
        await self._adoption.close()
        await self._prefetcher.close()
        await self._dispatcher.close()
        await self._jobs.close()
        await asyncio.gather(*self._ending, return_exceptions=True)

    @property
    def sound(self) -> bool:
        """Whether fleet and queue are looked after: one fault may pass, several in a row are ours and stay."""
        faults = self._faults
        return len(faults) < _MOST_FAULTS or self._clock.monotonic() - faults[0] > _FAULTS_S

    def refuse_unmeetable(self, job: Job) -> None:
        """Raises DeadlineUnmeetable for a job whose deadline is before its end, by what was measured."""
        self._standings.refuse_unmeetable(job)

    def submit(self, job: Job) -> None:
        """Takes a job, which is durable: it waits or runs. The queue's bounds were checked."""
        log_lines.accepted(job)
        if self.draining:
            job.leave(Draining("the gateway is stopping; ask again", retry_after_s=1.0))
            return
        self._queue.add(job)
        self._set_deadline(job)
        self._matching.at_once(job.spec.model, free_at=job.queued_at)
        if job.state == image_pb2.JOB_STATE_QUEUED:
            self._standings.tell_last(job)
            if len(self._queue.line(job.bare.model)) <= _AHEAD:
                self._prefetcher.ahead([job])

    def show(self, job: Job) -> None:
        """Somebody wants previews of the job."""
        if job.live:
            self._dispatcher.show(job)

    def extend(self, job: Job, deadline: float | None) -> None:
        """Somebody else wants the job, and until then (monotonic; None: without bound). It never gets less time."""
        if self._jobs.find(job.job_id) is job and job.give_until(deadline):
            self._forget_deadline(job)
            self._set_deadline(job)
            self._jobs.extended(job)

    def cancel(self, job: Job) -> None:
        """Cancels a job; one that has ended stays as it is."""
        if job.cancel():
            self._dispatcher.drop(job)
            self._decided(job)

    async def cancel_for_good(self, job: Job) -> None:
        """The same; returns when it is written. Raises StorageUnavailable when the disk cannot take it now.

        Where the job can only be looked at, nothing is decided: whoever hears no must not be obeyed later.
        """
        self._jobs.refuse_copy(job)
        self.cancel(job)
        await self._jobs.written(job)

    def abandon(self, job: Job) -> None:
        """The only caller has gone, which by the deadline is its passing; a job that has ended stays as it is."""
        if self._at_deadline(job):
            self._pass_deadline(job)
        else:
            self.cancel(job)

    def fail(self, job: Job, error: BottegaError) -> None:
        """Fails a job; one that has ended stays as it is."""
        if job.fail(error):
            self._dispatcher.drop(job)
            self._decided(job)

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
        for model in self._queue.models() if member.is_controlnet_server else [model.name for model in member.models]:
            self._matching.soon(model)

    def member_lost(self, member: Member) -> None:
        """See FleetObserver."""
        self._count_members()
        self._dispatcher.lose(member)
        self._prefetcher.lose(member)
        self._seating.forget(member)

    # What the dispatcher tells.

    def attempt_sent(self, job: Job) -> None:
        """See AttemptObserver."""
        self._metrics.routed(queue_s=job.routed_at - job.queued_at, route_s=job.sent())
        self._jobs.begun(job)

    def attempt_advanced(self, job: Job) -> None:
        """See AttemptObserver."""
        self._matching.soon(job.spec.model)

    def attempt_dressed(self, job: Job) -> None:
        """See AttemptObserver."""
        self._jobs.dressed(job)

    def attempt_lost(self, job: Job, number: int, error: BottegaError) -> None:
        """See AttemptObserver."""
        if not job.is_current(number):
            return
        self._metrics.attempt_lost()
        log_lines.attempt_lost(job, error)
        job.requeue(number, died=is_death(error), alone=died_alone(error))
        if job.deaths >= _POISONOUS:
            self.fail(job, Poisoned(f"{job.deaths} workers died of this job: each ran it alone"))
        elif job.losses >= self._max_attempts:
            self.fail(job, WorkerLost(f"{job.losses} workers were lost with this job", retry_after_s=1.0))
        else:
            self._jobs.waits_again(job)
            self._line_up_again(job)

    def attempt_returned(self, job: Job, number: int, error: BottegaError) -> None:
        """See AttemptObserver."""
        if not job.is_current(number):
            return
        self._metrics.attempt_returned()
        log_lines.attempt_lost(job, error)
        if isinstance(error, NoControlNet):
            self._placement.let_rest(job, error)
        else:
            self._fleet.let_rest(job.worker)
        job.take_back(number)
        most = min(_MOST_RETURNS * max(1, len(self._fleet.serving(job.spec.model))), MOST_ATTEMPTS)
        if job.returns >= most or job.attempts >= MOST_ATTEMPTS:
            self.fail(job, _not_taken(error))
            return
        self._jobs.waits_again(job)
        self._line_up_again(job)

    def attempt_failed(self, job: Job, number: int, error: BottegaError) -> None:
        """See AttemptObserver."""
        if isinstance(error, DeadlinePassed) and not self._at_deadline(job):
            self.attempt_returned(job, number, error)  # the worker only knew of the deadline that there was at first
        elif job.fail(error, number):
            self._decided(job)

    def attempt_completed(self, job: Job, number: int, pictures: tuple[Picture, ...], provenance: Provenance) -> None:
        """See AttemptObserver."""
        if job.complete(number, pictures, provenance):
            self._queue.one_done()
            self._completed.append((job.job_id, number))
            self._decided(job)

    # What follows.

    def _line_up_again(self, job: Job) -> None:
        self._queue.add(job, first=True)
        self._matching.at_once(job.spec.model)
        if job.state == image_pb2.JOB_STATE_QUEUED:
            job.stand(Standing(place=0, estimate_s=None))

    def _stop_stale_attempts(self, member: Member) -> None:
        """Frees a worker of attempts that count no more, such as after it was frozen for a while."""
        for running in member.load.running:
            job = self._jobs.find(running.attempt.job_id)
            number = running.attempt.number
            if job is not None:
                stale = number < job.number  # a later one than ours is for the adoption to judge
            else:
                stale = self._jobs.restored and (running.attempt.job_id, number) not in self._completed
            if stale:
                self._dispatcher.stop_attempt(member, running.attempt)

    def _decided(self, job: Job) -> None:
        """How the job ends is decided: that is written, and told then."""
        self._queue.remove(job)
        self._adoption.let_go(job)
        self._forget_deadline(job)
        task = asyncio.create_task(self._end(job))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        self._matching.at_once(job.bare.model)

    async def _end(self, job: Job) -> None:
        await self._jobs.end(job)
        log_lines.ended(job)
        self._metrics.job_ended(JobState.Name(job.state).removeprefix("JOB_STATE_").lower())

    def _set_deadline(self, job: Job) -> None:
        if job.deadline is not None:
            left_s = max(0.0, job.deadline - self._clock.monotonic())
            self._deadlines[job.job_id] = asyncio.get_running_loop().call_later(left_s, self._pass_deadline, job)

    def _forget_deadline(self, job: Job) -> None:
        deadline = self._deadlines.pop(job.job_id, None)
        if deadline is not None:
            deadline.cancel()

    def _at_deadline(self, job: Job) -> bool:
        return job.deadline is not None and self._clock.monotonic() > job.deadline - _AT_DEADLINE_S

    def _drop_late(self, job: Job, estimate_s: float) -> None:
        assert job.deadline is not None
        self.fail(job, unmeetable(estimate_s, job.deadline - self._clock.monotonic()))

    def _pass_deadline(self, job: Job) -> None:
        where = "in the queue" if job.state == image_pb2.JOB_STATE_QUEUED else "while it was drawn"
        self.fail(job, DeadlinePassed(f"the deadline passed {where}"))

    async def _tick(self) -> None:
        for tick in itertools.count(1):
            due = self._clock.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            try:
                await self._look_after(tick, late=self._clock.monotonic() - due > _LATE_S)
            except Exception:  # noqa: BLE001 - the boundary of the task: without it no lease ends, and nobody gets a turn
                _log.exception("the fleet and the queue could not be looked after")
                self._faults.append(self._clock.monotonic())
                await asyncio.sleep(_TICK_S * _TICKS_PER_SECOND)  # what fails every time is not logged every time

    async def _look_after(self, tick: int, *, late: bool) -> None:
        if late:
            _log.warning("the event loop was late; leases are renewed")
            self._fleet.forgive()
        else:
            self._fleet.expire()
        if tick % _TICKS_PER_SECOND == 0:
            await self._look_after_queue()

    async def _look_after_queue(self) -> None:
        patient = self._clock.monotonic() < self._patient_until
        for model in self._queue.models():
            if patient or self._fleet.expected(model):
                self._matching.at_once(model)
                for job, error in list(self._standings.unmeetable(model)):
                    self.fail(job, error)
                self._look_after_controlnets(model, patient=patient)
                continue
            for job in list(self._queue.line(model)):
                self.fail(job, NoWorker("no worker came back for the model", retry_after_s=self._queue.retry_after_s()))
        await self._standings.tell_all()

    def _look_after_controlnets(self, model: str, *, patient: bool) -> None:
        line = self._queue.line(model)
        self._prefetcher.ahead(itertools.islice(line, _AHEAD))
        if patient:
            return
        for job in [job for job in line if job.controlnets]:
            gone = self._placement.missing(job)
            if gone is not None:
                self.fail(job, gone)

    def _count_members(self) -> None:
        counts = Counter(member.registration.kind for member in self._fleet.members())
        for kind in ServiceKind.values()[1:]:
            self._metrics.members(ServiceKind.Name(kind).removeprefix("SERVICE_KIND_").lower(), counts[kind])


def _not_taken(error: BottegaError) -> BottegaError:
    """Why a job fails that nobody takes, however often it is offered."""
    if isinstance(error, NoControlNet):
        return error
    return NoWorker(f"no worker took the job: {error.message}", retry_after_s=1.0)


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
