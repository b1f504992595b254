"""Recovery after a restart of the gateway: jobs that ran go on at the workers that still have their attempts.

Such a job is held for a moment, so that its worker can come back. The attempts of every worker that joins are listed:
those that count go on, the others are stopped. A job that no worker claims in time is queued again, before the others.
If its worker comes later, its attempt still goes on unless another one was started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from bottega.addons.interface.member import Member
from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError
from bottega.gateway.dispatch.connection import WorkerConnection
from bottega.gateway.dispatch.dispatcher import Dispatcher
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.scheduler import Scheduler
from bottega.v1 import worker_pb2
from bottega.v1.image_pb2 import JOB_STATE_QUEUED

# A timer that is later than this expired while this process was stopped itself, when no worker could come.
_LATE_S = 0.5

_log = logging.getLogger(__name__)


class AttemptRecovery:
    """The recovery of the jobs that were running in an earlier life of the gateway.

    Args:
        hold_s: How long a job waits for its worker, in seconds.
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
        self._unclaimed: dict[Job, int] = {}  # queued again, by the attempt that nobody had claimed
        self._expiry: asyncio.TimerHandle | None = None
        self._listing = BackgroundTasks("lists of the attempts of workers")

    def restore(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs of an earlier life, the oldest first, and hold those that were running."""
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
        """Return whether the job waits for its worker."""
        return job.open and job.job_id in self._held

    def add_worker(self, member: Member) -> None:
        """List the attempts of a worker that has joined.

        It gets jobs at once, or after its answer if it may have held jobs.
        """
        self._unclaimed = {job: number for job, number in self._unclaimed.items() if self._is_unclaimed(job)}
        hold_back = bool(self._unclaimed) or any(map(self.is_held, self._held.values()))
        if hold_back:
            self._scheduler.hold_back(member)
        else:
            self._scheduler.add_worker(member)
        self._listing.start(self._list_attempts(member, held_back=hold_back))

    def stop_stale_attempts(self, member: Member) -> None:
        """Stop a worker's attempts that no longer count, such as after it was frozen for a while."""
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
        """Release all jobs, and stop listing attempts."""
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
        """Return whether an attempt is current. One with a higher number than ours began before that was stored."""
        if self.is_held(job):
            return True
        return job.state == JOB_STATE_QUEUED and (number > job.number or self._is_unclaimed(job))

    def _is_unclaimed(self, job: Job) -> bool:
        """Return whether the job was held and queued again, and no attempt at it has started since."""
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
