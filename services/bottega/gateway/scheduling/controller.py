"""The job controller, which moves jobs through their states, from acceptance to outcome.

Callers submit, extend and cancel jobs, the dispatcher reports the progress of attempts, and deadlines pass. The
controller changes the job accordingly, writes the change, and makes the scheduler assign jobs to workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from bottega.addons.interface.gateway_addon import PREFETCHED_JOBS, AddOn, PrefetchReason
from bottega.addons.interface.views import Member
from bottega.background_tasks import BackgroundTasks
from bottega.clocks import Clock
from bottega.errors import BottegaError, DeadlinePassed
from bottega.gateway.config import GatewayConfig
from bottega.gateway.dispatch.dispatcher import Dispatcher
from bottega.gateway.dispatch.job_traces import JobTraces
from bottega.gateway.dispatch.worker_client import WorkerClient, died_alone, is_death
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs import conversion
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.values import StoredImage
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.scheduling.demand import FleetDemand
from bottega.gateway.scheduling.line import DuePolicy
from bottega.gateway.scheduling.outcomes import (
    Deadlines,
    JobFinisher,
    QueueEstimates,
    detach_when_idle,
    draining,
    failure_after_loss,
    failure_after_return,
)
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.scheduler import AttemptRecovery, Scheduler
from bottega.gateway.scheduling.snapshot import FleetSnapshot
from bottega.gateway.signing import SigningFiles
from bottega.gateway.tenants import QuotaLedger, TenantTerms
from bottega.rpc.channel import Target
from bottega.v1.generation_pb2 import Provenance
from bottega.v1.image_pb2 import JOB_STATE_QUEUED

_log = logging.getLogger(__name__)


class JobController:
    """Moves the jobs of a gateway through their states. `start` it before the first job, and `stop` it after the last.

    Args:
        connect: Creates the client of a worker.
        terms: Weights and quotas of tenants.

    Attributes:
        queue: The jobs that wait for a worker.
        scheduler: Assigns the jobs of the queue to workers.
        estimates: Estimates when jobs complete.
        demand: Decides how many services each model needs.
        draining: Whether new jobs are refused.
        signing: The certificate that signs pictures.
    """

    def __init__(
        self,
        *,
        config: GatewayConfig,
        fleet: Fleet,
        jobs: JobRepository,
        addons: Sequence[AddOn],
        connect: Callable[[Target], WorkerClient],
        terms: TenantTerms,
        metrics: GatewayMetrics,
        clock: Clock,
    ) -> None:
        self.clock = clock
        self.draining = False
        self._max_attempts = config.max_attempts
        self._fleet = fleet
        self._jobs = jobs
        self._addons = addons
        self._metrics = metrics
        self._deadlines = Deadlines(clock)
        self._finding = BackgroundTasks("jobs that were found in the store")
        self.traces = JobTraces(config.traces_bytes)
        self.signing = SigningFiles(config, clock)
        self._dispatcher = Dispatcher(
            connect,
            jobs.storage,
            addons,
            self,
            traces=self.traces,
            max_result_bytes=config.max_result_bytes,
            weigh=terms.weight,
            signing=self.signing,
        )
        self._snapshot = FleetSnapshot(fleet, self._dispatcher, jobs, addons, clock)
        self.queue = JobQueue(
            max_jobs=config.max_queued,
            budget_bytes=config.max_queued_bytes,
            clock=clock,
            terms=terms,
            due=DuePolicy(slo_scale=config.slo_scale, head_start_s=config.priority_head_start_s),
            sizes=self._snapshot,
        )
        self.quotas = QuotaLedger(
            terms=terms, waiting=self.queue.held, usage=jobs.usage, retry_s=self.queue.retry_after_s, clock=clock
        )
        self._finisher = JobFinisher(self.queue, self._deadlines, jobs, metrics)
        self.estimates = QueueEstimates(self.queue, self._snapshot, clock)
        self.demand = FleetDemand(
            config=config.scaling,
            fleet=fleet,
            queue=self.queue,
            snapshot=self._snapshot,
            dispatcher=self._dispatcher,
            clock=clock,
        )
        self.scheduler = Scheduler(
            fleet=fleet,
            queue=self.queue,
            snapshot=self._snapshot,
            jobs=jobs,
            storage=jobs.storage,
            dispatcher=self._dispatcher,
            finisher=self._finisher,
            clock=clock,
        )
        self._recovery = AttemptRecovery(self._dispatcher, self.scheduler, self.queue, jobs, hold_s=config.hold_s)
        metrics.queued.set_function(self.queue.__len__)
        metrics.longest_wait.set_function(self.queue.longest_wait_s)
        metrics.running.set_function(lambda: self._dispatcher.attempts)
        metrics.signing_expires.set_function(self.signing.expires_wall)
        metrics.register_tenants(self.queue.held_by_tenant)
        metrics.register_demand(lambda: self.demand.demand)
        fleet.subscribe(self)

    # The gateway starts and stops.

    def restore(self, jobs: Sequence[Job], *, seconds: float = 0.0) -> None:
        """Resume the jobs from before a restart of the gateway.

        Waiting jobs are queued in their order of arrival. Running jobs continue when their worker reconnects. Jobs that
        end with their caller are cancelled, because the restart ended their calls.

        Args:
            jobs: Jobs that had not ended, in order of arrival.
            seconds: Seconds that it took to read them, for the log.
        """
        orphans = [job for job in jobs if job.open and job.request.ends_with_caller]
        kept = [job for job in jobs if job.open and not job.request.ends_with_caller]
        for job in jobs:
            if not job.open:
                self._finish(job)  # it cannot be drawn any more
        for job in kept:
            self._deadlines.watch(job, self._pass_deadline)
        self._recovery.restore(kept)
        if jobs:
            conversion.log_restored(len(jobs), sum(map(self._recovery.is_held, kept)), seconds)
        for member in self._fleet.members():
            self.member_joined(member)
        for job in orphans:
            self.abandon(job, "its only caller was disconnected when the gateway restarted")

    def start(self) -> None:
        """Start the background tasks."""
        self._finding.start(self._submit_found())
        for addon in self._addons:
            addon.start()

    async def drain(self) -> None:
        """Accept no new jobs, and wait until the running ones have ended. Waiting jobs stay stored for the next start.

        Watchers of waiting jobs get Draining, and may watch them again after the restart. If this is cancelled,
        watchers of jobs that still run get it too; the workers go on.
        """
        self.draining = self.scheduler.draining = True
        try:
            await detach_when_idle(self._jobs.live(), is_held=self._recovery.is_held)
        finally:
            self.hand_over()

    async def wait_for_callers(self) -> None:
        """Wait until the jobs that end with their callers have ended, as far as there are any now."""
        await asyncio.gather(*(job.ended.wait() for job in self._jobs.live() if job.request.ends_with_caller))

    def hand_over(self) -> None:
        """Stop changing jobs, because another process goes on with them. Their watchers get Draining."""
        self.draining = self.scheduler.draining = True
        for job in list(self._jobs.live()):
            job.detach(draining())
        self.demand.end()
        self._dispatcher.detach()
        self._fleet.close()

    async def stop(self) -> None:
        """Stop reading the events of all attempts, and end all calls to workers."""
        await self._finding.cancel()
        self._deadlines.close()
        self.scheduler.close()
        await self._recovery.close()
        for addon in self._addons:
            await addon.close()
        await self._dispatcher.close()
        await self._jobs.close()
        await self._finisher.join()

    @property
    def has_jobs(self) -> bool:
        """Whether there are jobs that have not ended."""
        return any(True for _ in self._jobs.live())

    # What callers want.

    def submit(self, job: Job) -> None:
        """Queue a stored job, unless it has ended already. The caller has checked the bounds of the queue."""
        conversion.log_accepted(job)
        if not job.live:
            self._finisher.count(job)
            return
        if self.draining:
            job.detach(draining())
            return
        self._fleet.wake_up()
        self.demand.note_arrival(job)
        for addon in self._addons:
            addon.prefetch([job], PrefetchReason.ARRIVED)
        self.queue.add(job)
        self._deadlines.watch(job, self._pass_deadline)
        self.scheduler.schedule(job.spec.model, free_at=job.times.queued_at)
        if job.state == JOB_STATE_QUEUED:
            self.estimates.publish(job)
            if self.queue.waiting(job.bare.model) <= PREFETCHED_JOBS:
                for addon in self._addons:
                    addon.prefetch([job], PrefetchReason.NEXT)

    def enable_previews(self, job: Job) -> None:
        """Request previews from the current and later attempts of a job."""
        if job.live:
            self._dispatcher.enable_previews(job)

    def extend(self, job: Job, deadline: float | None) -> None:
        """Set a later deadline of a job for another caller; never an earlier one.

        Args:
            job: The job.
            deadline: Time after which that caller no longer wants the result, on the monotonic clock; None means no
                bound.
        """
        if self._jobs.find_live(job.job_id) is job and job.extend_deadline(deadline):
            self._deadlines.watch(job, self._pass_deadline)
            self._jobs.save(job)

    def cancel(self, job: Job, why: str = "the job was cancelled") -> None:
        """Cancel a job. Does nothing if the job has ended."""
        if job.cancel(why):
            self._dispatcher.cancel_attempt(job)
            self._finish(job)

    async def cancel_durably(self, job: Job) -> None:
        """Cancel a job, and wait until that is durable. Raises StorageUnavailable if the disk cannot be written now.

        If the job is read-only, nothing is decided, because a cancellation that was refused must not happen later.
        """
        self._jobs.check_changeable(job)
        self.cancel(job)
        await self._jobs.wait_finished(job)

    def abandon(self, job: Job, why: str = "its only caller disconnected") -> None:
        """Cancel a job whose only caller disconnected, or fail it if that happened at its deadline."""
        if self._deadlines.has_passed(job):
            self._pass_deadline(job)
        else:
            self.cancel(job, why)

    # What the dispatcher reports (AttemptObserver).

    def attempt_sent(self, job: Job) -> None:
        """Measure how long the routing of an attempt took, and save the job."""
        self._metrics.routed(queue_s=job.times.routed_at - job.times.queued_at, route_s=job.mark_dispatched())
        self._jobs.save(job)

    def attempt_advanced(self, job: Job) -> None:
        """Schedule a round soon, because the attempt's worker may be able to accept a job now."""
        self.scheduler.schedule_soon(job.spec.model)

    def attempt_saved(self, job: Job) -> None:
        if self._jobs.checkpoints is not None:
            self._jobs.checkpoints.store(job)

    def attempt_decided(self, job: Job) -> None:
        """Save a decision of an attempt that later attempts at the job must repeat."""
        self._jobs.save(job)

    def attempt_lost(self, job: Job, number: int, error: BottegaError) -> None:
        """Retry or fail a job whose worker died or disconnected."""
        if not job.is_current(number):
            return
        self._metrics.attempts_lost.inc()
        conversion.log_attempt_lost(job, error)
        job.requeue_lost(number, died=is_death(error), exclusive=died_alone(error))
        self._retry(job, failure_after_loss(job, max_attempts=self._max_attempts))

    def attempt_returned(self, job: Job, number: int, error: BottegaError) -> None:
        """Retry or fail a job that its worker refused or returned, and give the service that caused it a pause."""
        if not job.is_current(number):
            return
        self._metrics.attempts_returned.inc()
        conversion.log_attempt_returned(job, error)
        by_addon = any(addon.back_off(job, error) for addon in self._addons)
        if not by_addon:
            self._fleet.back_off(job.worker)
        job.requeue_returned(number)
        workers = len(self._fleet.serving(job.spec.model))
        self._retry(job, failure_after_return(job, error, workers=workers, by_addon=by_addon))

    def attempt_failed(self, job: Job, number: int, error: BottegaError) -> None:
        """Fail a job because its worker reported that it cannot be drawn."""
        if isinstance(error, DeadlinePassed) and not self._deadlines.has_passed(job):
            # the worker knew only the first deadline, which was extended since
            self.attempt_returned(job, number, error)
        elif job.fail(error, number):
            self._finish(job)

    def attempt_over(self, job: Job, device_s: float | None) -> None:
        """Replace the estimated charge to a job's tenant with the device seconds that the ended attempt used."""
        self.queue.settle(job, device_s)

    def attempt_completed(self, job: Job, number: int, images: tuple[StoredImage, ...], provenance: Provenance) -> None:
        """Complete a job, all of whose images are stored."""
        if not job.is_current(number):
            return
        self._snapshot.note_turns(job, provenance)
        for addon in self._addons:
            addon.job_completed(job, provenance)
        if job.complete(number, images, provenance):
            self.queue.count_completed()
            self._finish(job)

    # What the fleet reports (FleetObserver).

    def member_joined(self, member: Member) -> None:
        """Ask a worker that has joined which attempts it still runs, and then assign jobs to it.

        Before the jobs are restored, another gateway may be the scheduler, and this one calls no worker.
        """
        if member.is_worker and self._jobs.restored:
            self._dispatcher.add_worker(member)
            self._recovery.add_worker(member)

    def member_changed(self, member: Member) -> None:
        """Schedule the queues that a member's report may help: it accepts jobs, or hosts an add-on they wait for."""
        for addon in self._addons:
            addon.member_changed(member)
        self._recovery.stop_stale_attempts(member)
        for model in [model.name for model in member.models] if member.is_worker else self.queue.models():
            self.scheduler.schedule_soon(model)

    def member_lost(self, member: Member) -> None:
        """Report the attempts of a lost member as lost."""
        self._dispatcher.remove_worker(member)
        for addon in self._addons:
            addon.member_changed(member, lost=True)
        self._snapshot.forget(member)

    # How jobs go on, or end.

    def fail(self, job: Job, error: BottegaError) -> None:
        """Fail a job, whether it is queued or running. Do nothing if it has ended."""
        if job.fail(error):
            self._dispatcher.cancel_attempt(job)
            self._finish(job)

    def _retry(self, job: Job, failure: BottegaError | None) -> None:
        """Queue a job again, before the others, or fail it with `failure` if that is not None."""
        if failure is not None:
            self.fail(job, failure)
        else:
            self.scheduler.requeue(job)

    def _pass_deadline(self, job: Job) -> None:
        where = "in the queue" if job.state == JOB_STATE_QUEUED else "while it was drawn"
        self.fail(job, DeadlinePassed(f"the deadline passed {where}"))

    def _finish(self, job: Job) -> None:
        """Remove a job from scheduling once its outcome is decided, write the outcome, and schedule the next job."""
        self._finisher.finish(job)
        self.scheduler.schedule(job.bare.model)

    async def _submit_found(self) -> None:
        while True:
            job = await self._jobs.next_found()
            try:
                if job.open:
                    self.submit(job)
            except Exception:  # noqa: BLE001 - the boundary of the task: without it no other job is found
                _log.exception("a live job from the store could not be queued", extra=conversion.job_fields(job))
