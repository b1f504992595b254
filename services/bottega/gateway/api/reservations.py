"""Places in the scheduler's queue for jobs that other gateways check and store by themselves (api/following.py).

What only the scheduler knows is asked before a job is stored: whether the queue has room, and the deadline can be met.

    the other gateway              the scheduler
    is about to store a job        reserves a place, or refuses the job
    has stored it                  queues it
    has not stored it              gives the place to others
    got no answer of the database  looks for the job in the store, once a second: one with a request_id is queued, the
                                   others are cancelled, because their callers got an error
    says nothing for some seconds  does the same, but queues every job: it may be acknowledged

A new scheduler finds all stored jobs when it starts. What is stored for an earlier scheduler after that is refused,
because the store checks the lease in the same transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from pydantic import TypeAdapter, ValidationError

from bottega import rules
from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, DataLoss, Draining, InvalidRequest, StorageUnavailable, Violation
from bottega.gateway.api.admission import Admission
from bottega.gateway.api.validation import check_ids
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.store import JobRecord
from bottega.gateway.scheduler_role import SchedulerRole
from bottega.gateway.scheduling.controller import JobController
from bottega.gateway.tenants import Admittance
from bottega.rpc.status import to_job_error
from bottega.v1 import fleet_pb2
from bottega.v1.error_pb2 import JobError
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import JOB_STATE_QUEUED

MAX_JOBS = 1000
"""Upper bound on the jobs in each list of a call."""
_LOOK_S = 1.0
# Seconds without a word after which the store is asked. A healthy database takes milliseconds.
_SILENT_S = 3.0
# Looks after which a job is certainly not stored: longer than a gateway and the database try.
_MAX_LOOKS = 60
# Jobs whose inputs are read at once: half of the connections to the database.
_READS = 4
_RECORD = TypeAdapter(JobRecord)
_NO_REFUSAL = JobError()

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Place:
    job: Job
    admittance: Admittance
    reserved_at: float
    """Time on the clock of the event loop."""
    doubtful: bool = False
    """Whether the caller got an error, although the job may be stored."""
    looks: int = 0


def packed(record: JobRecord) -> bytes:
    """Return a record of a new job as JSON, without fields that have their defaults."""
    return _RECORD.dump_json(record, exclude_defaults=True)


class Reservations:
    """Places in the queue for jobs that other gateways store.

    Args:
        controller: Queues the jobs.
        admission: Checks the bounds of the queue.
        jobs: The jobs of this gateway.
        role: Says whether this gateway is the scheduler.
    """

    def __init__(
        self, *, controller: JobController, admission: Admission, jobs: JobRepository, role: SchedulerRole
    ) -> None:
        self._controller = controller
        self._admission = admission
        self._jobs = jobs
        self._role = role
        self._reading = asyncio.Semaphore(_READS)
        self._places: dict[str, _Place] = {}
        self._is_looking = False
        self._looking = BackgroundTasks("looking for jobs that other gateways store")

    async def close(self) -> None:
        """Stop looking for jobs."""
        await self._looking.cancel()

    async def admit(self, request: fleet_pb2.AdmitJobsRequest) -> fleet_pb2.AdmitJobsResponse:
        """Do what another gateway tells and asks, and return the refusals of its new jobs.

        Raises InvalidRequest, Draining if this gateway is not the scheduler, and StorageUnavailable.
        """
        rules.refuse(list(_violations(request)))
        records = [_record_in(new) for new in request.new_jobs]
        is_for_another = self._role.held and request.generation not in (0, self._role.generation)
        if not self._jobs.restored or self._role.lost or is_for_another:
            raise Draining("this gateway is not the scheduler", retry_after_s=1.0)
        for job_id in request.dropped:
            self._leave(job_id)
        for job_id in request.doubtful:
            if (place := self._places.get(job_id)) is not None:
                place.doubtful, place.reserved_at = True, 0.0
        await _all([self._take_stored(stored) for stored in request.stored])
        return fleet_pb2.AdmitJobsResponse(refusals=[await self._reserve(record) for record in records])

    async def _reserve(self, record: JobRecord) -> JobError:
        if self._jobs.find_live(record.job_id) is not None:  # a repeated call that comes late
            return to_job_error(InvalidRequest("new_jobs: the job is stored already"))
        self._leave(record.job_id)  # the call may be repeated
        try:
            async with self._controller.quotas.admitting(record.tenant, asks_store=False) as admittance:
                job = self._jobs.expect(record)
                try:
                    self._admission.reserve(job)
                except BaseException:
                    self._jobs.expect_no_more(job)
                    raise
        except BottegaError as error:
            return to_job_error(error)
        now = asyncio.get_running_loop().time()
        self._places[job.job_id] = _Place(job=job, admittance=admittance, reserved_at=now)
        if not self._is_looking:
            self._is_looking = True
            self._looking.start(self._look())
        return _NO_REFUSAL

    async def _take_stored(self, stored: fleet_pb2.StoredJob) -> None:
        if (place := self._places.get(stored.job_id)) is not None:
            await self._take(place, sequence=stored.sequence, has_inputs=stored.has_inputs)
            return
        async with self._reading:
            await self._jobs.discover(stored.job_id)

    async def _take(self, place: _Place, *, sequence: int, has_inputs: bool) -> None:
        job = place.job
        async with self._reading if has_inputs else contextlib.nullcontext():
            taken = await self._jobs.take_stored(job, sequence=sequence, has_inputs=has_inputs)
        self._places.pop(job.job_id, None)
        if not taken:
            return
        place.admittance.count()
        self._controller.submit(job)
        if place.doubtful and not job.request.request_id:
            self._controller.cancel(job, "the caller got an error and gave no request_id, so the job is cancelled")

    def _leave(self, job_id: str) -> None:
        """Give back the place of a job, if it has one."""
        if (place := self._places.pop(job_id, None)) is not None:
            self._jobs.expect_no_more(place.job)
            self._controller.queue.remove(place.job)

    async def _look(self) -> None:
        """Look for jobs in the store whose gateways have been silent for a while, until there are no more."""
        while self._places:
            await asyncio.sleep(_LOOK_S)
            before = asyncio.get_running_loop().time() - _SILENT_S
            silent = [place for place in self._places.values() if place.reserved_at < before]
            try:
                if silent:
                    await self._look_for(silent)
            except (StorageUnavailable, DataLoss) as error:
                self._jobs.storage.report_failure(error)
            except Exception:  # noqa: BLE001 - the boundary of the task: without it no lost job is found
                _log.exception("looking for jobs that other gateways store failed; it is tried again")
        self._is_looking = False

    async def _look_for(self, silent: Sequence[_Place]) -> None:
        stored = {record.job_id: record for record in await self._jobs.find_stored([p.job.job_id for p in silent])}
        found: list[Coroutine[Any, Any, None]] = []
        for place in silent:
            job_id = place.job.job_id
            if self._places.get(job_id) is not place:
                continue  # its gateway has answered for it
            if (record := stored.get(job_id)) is not None:
                _log.info("a job that another gateway has stored was found", extra={"job_id": job_id})
                found.append(self._take(place, sequence=record.sequence, has_inputs=True))
                continue
            place.looks += 1
            if place.looks >= _MAX_LOOKS:
                self._leave(job_id)
        await _all(found)


async def _all(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all to their ends, and then raise the first error."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _record_in(new: bytes) -> JobRecord:
    try:
        record = _RECORD.validate_json(new)
        GenerationSpec.FromString(record.spec)
        if record.job_id and record.state == JOB_STATE_QUEUED and not (record.sequence or record.decisions):
            return record
    except (ValidationError, DecodeError):
        pass
    rule = "must be the JSON of the record of a new job"
    raise InvalidRequest(f"new_jobs: {rule}", violations=[Violation(field="new_jobs", description=rule)])


def _violations(request: fleet_pb2.AdmitJobsRequest) -> Sequence[Violation]:
    lists = {name: getattr(request, name) for name in ("new_jobs", "stored", "dropped", "doubtful")}
    found = [
        Violation(field=name, description=f"must be at most {MAX_JOBS}")
        for name, items in lists.items()
        if len(items) > MAX_JOBS
    ]
    if request.generation < 0:
        found.append(Violation(field="generation", description="must be at least 0"))
    if any(stored.sequence < 1 for stored in request.stored):
        found.append(Violation(field="stored.sequence", description="must be at least 1"))
    return [*found, *check_ids("stored.job_id", *(stored.job_id for stored in request.stored))]
