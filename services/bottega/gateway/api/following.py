"""Admission of jobs at a gateway that is not the scheduler.

It checks a request and decodes its images, and stores the job by itself; the scheduler reserves a place in the queue
before, and queues the job after. Both messages are small, and those of many jobs travel together. Quotas and
request_ids are checked by the database in the transaction that stores the job, which is refused if the scheduler has
changed since it reserved the place (`PostgresJobStore.add`).

The job is acknowledged when it is stored. If this gateway or the scheduler dies before the scheduler knows that, this
or the next scheduler finds the job in the database (api/reservations.py). A request that this gateway cannot decide
alone is passed on whole, as all are without this module: one with a known request_id, one that stored pictures may
answer, and one that would be refused for a reason that the scheduler may know better.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from bottega.addons.interface.views import Access, JobRequest
from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, Draining, MethodNotServed, StorageUnavailable
from bottega.gateway.api.admission import Admission
from bottega.gateway.api.reservations import MAX_JOBS, packed
from bottega.gateway.api.scheduler_calls import InterruptedCall, SchedulerCalls
from bottega.gateway.jobs.conversion import inputs_of, new_record_of
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.store import JobRecord, NotAdded, StaleGeneration
from bottega.gateway.scheduler_role import LeaseHolder, SchedulerRole
from bottega.rpc.status import from_job_error
from bottega.storage import os_errors
from bottega.v1 import fleet_pb2
from bottega.v1.generation_pb2 import GenerationSpec

# Upper bound on the bytes of the records in one call, which may have a little more.
_MAX_CALL_BYTES = 1 << 20
PAUSE_S = 5.0
"""Seconds for which requests are passed on after the database has failed here: the scheduler may reach it."""
# Seconds for which the scheduler is told something.
_TELL_S = 5.0
# Seconds before the scheduler is told again what it did not answer.
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Notice:
    message: fleet_pb2.AdmitJobsRequest
    answered: asyncio.Future[BottegaError | None]
    """Gets why a new job is refused; None if it has a place, or for what is only told."""


class _SchedulerLine:
    """Sends admission messages to one scheduler in batches, at most one call of each kind at a time.

    One kind asks for places, and the other one tells what became of jobs: it may take longer, because the scheduler
    reads input images.

    Args:
        scheduler: The scheduler.
        calls: Calls it.
        role: Says when another gateway is the scheduler.
    """

    def __init__(self, scheduler: LeaseHolder, calls: SchedulerCalls, role: SchedulerRole) -> None:
        self.scheduler = scheduler
        self._calls = calls
        self._role = role
        self._waiting: dict[bool, deque[_Notice]] = {}
        """Messages to send, by whether they have new jobs. Only of the kinds that are being sent."""
        self._sending = BackgroundTasks("telling the scheduler of jobs")

    @property
    def lease(self) -> tuple[int, str]:
        """Generation and address of the scheduler's lease."""
        return self.scheduler.generation, self.scheduler.address

    async def reserve(self, record: bytes) -> BottegaError | None:
        """Return why a new job is refused, or None if it has a place. Raises InterruptedCall and BottegaError."""
        return await self._send(fleet_pb2.AdmitJobsRequest(new_jobs=[record]))

    async def tell(self, message: fleet_pb2.AdmitJobsRequest) -> None:
        """Tell what became of a job, until the scheduler has answered or another gateway is the scheduler.

        If neither happens in some seconds, the scheduler looks for the job in the database.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TELL_S):
                while self._role.other == self.scheduler:
                    try:
                        await self._send(message)
                    except (InterruptedCall, BottegaError):
                        await asyncio.sleep(_RETRY_S)
                    else:
                        return

    async def close(self) -> None:
        """End the call that is under way."""
        await self._sending.cancel()

    async def _send(self, message: fleet_pb2.AdmitJobsRequest) -> BottegaError | None:
        answered: asyncio.Future[BottegaError | None] = asyncio.get_running_loop().create_future()
        kind = bool(message.new_jobs)
        if kind not in self._waiting:
            self._waiting[kind] = deque()
            self._sending.start(self._send_all(kind))
        self._waiting[kind].append(_Notice(message=message, answered=answered))
        return await answered

    async def _send_all(self, kind: bool) -> None:
        waiting = self._waiting[kind]
        try:
            while waiting:
                await self._send_next(waiting)
        finally:
            del self._waiting[kind]
            _fail(waiting, _closed())  # there are some if the line is closed

    async def _send_next(self, waiting: deque[_Notice]) -> None:
        """Send what waits, as far as it fits into one call."""
        notices: list[_Notice] = []
        request = fleet_pb2.AdmitJobsRequest(generation=self.scheduler.generation)
        while waiting and len(notices) < MAX_JOBS and request.ByteSize() < _MAX_CALL_BYTES:
            notices.append(waiting.popleft())
            request.MergeFrom(notices[-1].message)
        try:
            answer = await self._calls.admit_jobs(self.scheduler, request)
            refusals = iter(answer.refusals)
            results = [next(refusals) if notice.message.new_jobs else None for notice in notices]
        except asyncio.CancelledError:
            _fail(notices, _closed())
            raise
        except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
            _fail(notices, error)
        else:
            for notice, refusal in zip(notices, results, strict=True):
                if not notice.answered.done():  # else nobody waits for it any more
                    notice.answered.set_result(from_job_error(refusal) if refusal and refusal.code else None)


class FollowerAdmission:
    """Admits jobs while another gateway is the scheduler.

    Args:
        admission: Checks requests.
        jobs: The jobs of this gateway.
        calls: Calls the scheduler.
        role: Who the scheduler is.
    """

    def __init__(
        self, *, admission: Admission, jobs: JobRepository, calls: SchedulerCalls, role: SchedulerRole
    ) -> None:
        self._admission = admission
        self._jobs = jobs
        self._calls = calls
        self._role = role
        self._line: _SchedulerLine | None = None
        self._paused_until = 0.0
        self._storing = BackgroundTasks("storing of jobs for the scheduler")

    async def submit(self, spec: GenerationSpec, request: JobRequest, access: Access) -> Job | None:
        """Check a request and store its job; return None if the scheduler has to do that, and nothing is stored.

        Raises the errors of `Admission.admit`. The job is stored even if the caller disconnects meanwhile.
        """
        if asyncio.get_running_loop().time() < self._paused_until:
            return None
        try:
            job = await self._admission.prepare(spec, request, access)
        except StorageUnavailable:
            self._pause()
            return None
        if job is None:
            return None
        return job if await self._storing.run_shielded(self._store(job)) else None

    async def close(self) -> None:
        """Finish what has begun."""
        await self._storing.join(PAUSE_S)
        await self._storing.cancel()
        if self._line is not None:
            await self._line.close()

    async def _store(self, job: Job) -> bool:
        """Return False if nothing was stored and the scheduler must admit the request."""
        record, inputs = new_record_of(job, steady=self._jobs.storage.steady()), await inputs_of(job)
        new = packed(record)
        while (scheduler := self._role.other) is not None:
            line = self._line_to(scheduler)
            try:
                refusal = await line.reserve(new)
                if isinstance(refusal, Draining):
                    raise InterruptedCall(refusal, refused=True)
            except InterruptedCall as interruption:
                try:
                    await self._calls.retry(interruption, repeatable=True)
                except BottegaError:
                    self._storing.start(line.tell(_dropped(job)))
                    raise
                continue
            except MethodNotServed:  # a scheduler of an older version
                return False
            except BottegaError:  # it may have reserved a place, but too late
                await line.tell(_dropped(job))
                return False
            if isinstance(refusal, StorageUnavailable):
                return False
            if refusal is not None:
                raise refusal
            with contextlib.suppress(StaleGeneration):
                return await self._store_reserved(job, record, inputs, line)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    while self._role.other == scheduler:
                        await self._role.change()
        return False

    async def _store_reserved(self, job: Job, record: JobRecord, inputs: bytes, line: _SchedulerLine) -> bool:
        try:
            quotas = self._admission.quotas_of(job)
            stored = await self._jobs.add_for(record, inputs, lease=line.lease, quotas=quotas)
        except StaleGeneration:
            raise
        except NotAdded as error:
            if error.metadata.get("cause") != os_errors.BUSY:
                self._pause()
            await line.tell(_dropped(job))
            return False
        except StorageUnavailable:
            self._pause()
            self._storing.start(line.tell(fleet_pb2.AdmitJobsRequest(doubtful=[job.job_id])))
            raise
        except BottegaError:
            self._storing.start(line.tell(_dropped(job)))
            raise
        if stored.job_id != job.job_id:  # another gateway has stored a job with this request_id
            await line.tell(_dropped(job))
            return False
        told = fleet_pb2.StoredJob(job_id=job.job_id, sequence=stored.sequence, has_inputs=bool(inputs))
        await line.tell(fleet_pb2.AdmitJobsRequest(stored=[told]))
        job.sequence = stored.sequence
        self._admission.count_acknowledged()
        return True

    def _pause(self) -> None:
        self._paused_until = asyncio.get_running_loop().time() + PAUSE_S

    def _line_to(self, scheduler: LeaseHolder) -> _SchedulerLine:
        if self._line is None or self._line.scheduler != scheduler:
            if self._line is not None:
                self._storing.start(self._line.close())
            self._line = _SchedulerLine(scheduler, self._calls, self._role)
        return self._line


def _fail(notices: Iterable[_Notice], error: Exception) -> None:
    for notice in notices:
        if not notice.answered.done():  # else nobody waits for it any more
            notice.answered.set_exception(error)


def _closed() -> InterruptedCall:
    return InterruptedCall(Draining("another gateway is the scheduler now, or this one stops"), refused=False)


def _dropped(job: Job) -> fleet_pb2.AdmitJobsRequest:
    return fleet_pb2.AdmitJobsRequest(dropped=[job.job_id])
