"""What follows when a service joins the fleet, reports, or is lost."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.gateway.addons.addon import AddOn
from bottega.gateway.dispatch.dispatcher import Dispatcher
from bottega.gateway.fleet.members import Member
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.recovery import AttemptRecovery
from bottega.gateway.scheduling.scheduler import Scheduler
from bottega.gateway.scheduling.snapshot import FleetSnapshot


class MemberEvents:
    """The observer of the fleet."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        recovery: AttemptRecovery,
        scheduler: Scheduler,
        snapshot: FleetSnapshot,
        addons: Sequence[AddOn],
        queue: JobQueue,
        jobs: JobRepository,
    ) -> None:
        self._dispatcher = dispatcher
        self._recovery = recovery
        self._scheduler = scheduler
        self._snapshot = snapshot
        self._addons = addons
        self._queue = queue
        self._jobs = jobs

    def member_joined(self, member: Member) -> None:
        """A joined worker is asked for attempts that it still runs; then it gets jobs."""
        if member.is_worker:
            self._dispatcher.add_worker(member)
            self._recovery.add_worker(member)

    def member_changed(self, member: Member) -> None:
        """A worker may have room now, and a server may host what jobs wait for."""
        for addon in self._addons:
            addon.member_changed(member)
        self._stop_stale_attempts(member)
        for model in [model.name for model in member.models] if member.is_worker else self._queue.models():
            self._scheduler.schedule_soon(model)

    def member_lost(self, member: Member) -> None:
        """What it ran is lost."""
        self._dispatcher.remove_worker(member)
        for addon in self._addons:
            addon.member_lost(member)
        self._snapshot.forget(member)

    def _stop_stale_attempts(self, member: Member) -> None:
        """Frees a worker of attempts that count no more, such as after it was frozen for a while."""
        for running in member.load.running:
            job = self._jobs.find_live(running.attempt.job_id)
            if job is not None:
                stale = running.attempt.number < job.number  # the recovery judges one that is later than ours
            else:
                stale = self._jobs.restored and not self._dispatcher.has_completed(running.attempt)
            if stale:
                self._dispatcher.stop_stale_attempt(member, running.attempt)
