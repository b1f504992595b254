"""After a restart of the gateway: brings jobs that were running back together with the workers that still have them.

Such a job is held for a moment, so that its worker can come back. Every worker that joins is asked what it has: what
counts goes on there, the rest is stopped. Who is not claimed in time lines up again, before the others; a worker that
comes later than that still brings it along, unless it was begun anew. Knows no wire.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from bottega.errors import BottegaError
from bottega.gateway.dispatch.dispatcher import Dispatcher
from bottega.gateway.fleet.members import Member
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.scheduling.queue import JobQueue
from bottega.v1 import image_pb2, worker_pb2

# Later than this, the hold was over while this process was stopped itself, and no worker could come.
_LATE_S = 0.5

_log = logging.getLogger(__name__)


def _ignore(_: Member) -> None:
    """For a worker that has been seen to."""


class AttemptRecovery:
    """hold_s: how long a job waits for its worker. unclaimed: told of those that nobody claimed, the oldest last."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        queue: JobQueue,
        log: JobRepository,
        hold_s: float,
        unclaimed: Callable[[Job], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._queue = queue
        self._jobs = log
        self._hold_s = hold_s
        self._unclaimed = unclaimed
        self._held: dict[str, Job] = {}
        self._late: dict[Job, int] = {}  # lined up again, by the attempt that nobody had claimed
        self._silent: set[Member] = set()
        self._expiry: asyncio.TimerHandle | None = None
        self._asking: set[asyncio.Task[None]] = set()

    def hold(self, jobs: Sequence[Job]) -> None:
        """Jobs that were running when the gateway ended, the oldest first."""
        self._held.update((job.job_id, job) for job in jobs)
        if self._held:
            self._expire_later()

    def holds(self, job: Job) -> bool:
        """Whether the job waits for its worker."""
        return job.job_id in self._held

    def let_go(self, job: Job) -> None:
        """The job has ended some other way."""
        self._held.pop(job.job_id, None)

    def ask(self, member: Member, *, then: Callable[[Member], None]) -> None:
        """Asks a worker that has joined what it has. then: called with it, after that where it may matter."""
        self._late = {job: number for job, number in self._late.items() if self._is_late(job)}
        matters = bool(self._held or self._late)
        if matters:
            self._silent.add(member)
        else:
            then(member)
        task = asyncio.create_task(self._ask(member, then if matters else _ignore))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def awaits(self, member: Member) -> bool:
        """Whether it may matter what a worker will say that it has: until then it is given nothing."""
        return member in self._silent

    async def close(self) -> None:
        """Holds and asks no more."""
        self._held.clear()
        self._late.clear()
        if self._expiry is not None:
            self._expiry.cancel()
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def _ask(self, member: Member, then: Callable[[Member], None]) -> None:
        if not self._jobs.restored:
            return  # everybody is asked when they are
        try:
            await self._hear(member)
        finally:
            self._silent.discard(member)
        then(member)

    async def _hear(self, member: Member) -> None:
        try:
            summaries = await self._dispatcher.attempts_at(member)
            for summary in summaries if self._dispatcher.reaches(member) else ():
                self._look(member, summary.attempt)
        except BottegaError as error:
            _log.warning("a worker does not say what it has", extra={"member": member.name, "text": error.message})

    def _look(self, member: Member, attempt: worker_pb2.AttemptId) -> None:
        job = self._jobs.find_live(attempt.job_id)
        if job is not None and self._may_take(job, attempt.number) and job.adopt_attempt(member.name, attempt.number):
            self.let_go(job)
            self._queue.remove(job)
            _log.info("attempt adopted", extra={"job_id": job.job_id, "request_id": job.log_id, "worker": job.worker})
            self._dispatcher.adopt(job, member)
            self._jobs.save(job)
        elif job is None or not job.open or job.number != attempt.number:
            self._dispatcher.stop_attempt(member, attempt)

    def _may_take(self, job: Job, number: int) -> bool:
        """A later number than is known is an attempt that began when that could not be written any more."""
        if self.holds(job):
            return True
        return job.state == image_pb2.JOB_STATE_QUEUED and (number > job.number or self._is_late(job))

    def _is_late(self, job: Job) -> bool:
        """Whether the job was held, lined up again, and has not been begun since."""
        return job.open and job.state == image_pb2.JOB_STATE_QUEUED and self._late.get(job) == job.number

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
                self._late[job] = job.number
                self._unclaimed(job)
