"""The jobs of this gateway. Jobs that have not ended are in memory; all jobs are in the store.

A job's acceptance and its end are durable before any caller learns of them. The progress of a running job is only in
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from bottega.clocks import Clock
from bottega.errors import BottegaError, DataLoss, InternalError, JobCancelled, JobNotFound, StorageUnavailable
from bottega.gateway.jobs.checkpoints import SharedCheckpoints
from bottega.gateway.jobs.conversion import (
    WriteQueue,
    change_of,
    inputs_of,
    job_of,
    live_record_of,
    new_record_of,
    outcome_of,
    progress_of,
)
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.jobs.store import Change, EndTime, EventOf, JobRecord, NotAdded, TenantUsage, no_event
from bottega.gateway.jobs.values import JobOutcome
from bottega.rpc.security.tenant_file import UNBOUNDED, Quotas
from bottega.storage import os_errors
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import JOB_STATE_CANCELLED, JOB_STATE_FAILED, JOB_STATE_QUEUED

if TYPE_CHECKING:
    from bottega.gateway.jobs.store.postgresql import PostgresJobStore

# Seconds that a caller waits for a starting gateway to read its jobs.
_READY_S = 5.0

# Seconds to wait until a decided end is written; a healthy disk takes milliseconds.
_WRITTEN_S = 2.0

_log = logging.getLogger(__name__)


class JobRepository:
    """Finds and writes the jobs of a gateway. Call `restore` once the storage is open.

    Every method that reads may raise StorageUnavailable and DataLoss.

    Args:
        event_of: Makes the webhook event of an ended job.
        on_end: Called after each write that may have ended a job.

    Attributes:
        storage: The disk with the job store.
        checkpoints: Checkpoints that other gateways can read; None if they are in memory only.
        restored: Whether the jobs from before a restart were read. From then on, all live jobs are in memory.
    """

    def __init__(
        self,
        *,
        storage: Storage,
        clock: Clock,
        event_of: EventOf = no_event,
        on_end: Callable[[], None] = lambda: None,
        checkpoints: SharedCheckpoints | None = None,
    ) -> None:
        self.storage = storage
        self.checkpoints = checkpoints
        self._event_of = event_of
        self._on_end = on_end
        self._store = storage.jobs
        self._writes = WriteQueue(storage)
        self._clock = clock
        self._live: dict[str, Job] = {}
        self._adding: dict[str, Job] = {}
        self._by_request_id: dict[tuple[str, str], Job] = {}  # by tenant and request_id
        self._doubtful: set[str] = set()
        self._readable = asyncio.Event()
        self._found: asyncio.Queue[Job] = asyncio.Queue()
        self.restored = False

    @property
    def life(self) -> int:
        """Number of times that the gateway was started before this process."""
        return max(0, self._store.generation - 1)

    @property
    def readable(self) -> bool:
        """Whether jobs can be read from the store."""
        return self._readable.is_set()

    async def restore(self) -> list[Job]:
        """Return the unfinished jobs from before a restart, oldest first. Queue them before anything else happens.

        If a job can no longer be drawn, for example because its input images are damaged, its outcome is decided
        already, and the caller has to `finish` it.
        """
        jobs = [await self._restored_job(record) for record in await self._store.live()]
        for job in jobs:
            self._remember(job)
        self.restored = True
        self._readable.set()
        return jobs

    async def next_found(self) -> Job:
        """Wait for a live job that was in the store but not in memory, and return it. The caller has to queue it."""
        return await self._found.get()

    def allow_reads(self) -> None:
        """Allow reads of the store, although no jobs were restored: they may fail, and live jobs are read-only."""
        self._readable.set()

    def refuse_reads(self) -> None:
        """Let the scheduler answer reads, because the store cannot be read here now."""
        if not self.restored:
            self._readable.clear()

    async def close(self) -> None:
        """Finish pending writes. Give up if the disk fails."""
        if self.checkpoints is not None:
            await self.checkpoints.close()
        await self._writes.close()

    async def add(self, job: Job, *, replaces: str = "", quotas: Quotas = UNBOUNDED) -> Job:
        """Store a new job durably and return it, or return the existing job with the same request_id.

        A new job whose outcome is already decided has ended when this returns.

        Args:
            job: The new job.
            replaces: ID of the ended job from which this one takes over the request_id; "" if there is none.
            quotas: Quotas of its tenant that the store checks; see JobStore.add.
        """
        await self._wait_readable()
        new = new_record_of(job, steady=self.storage.steady())
        self._adding[job.job_id] = job
        try:
            record = await self._store.add(
                new, inputs=await inputs_of(job), replaces=replaces, event_of=self._event_of, quotas=quotas
            )
        except (StorageUnavailable, DataLoss) as error:
            # If the cause is BUSY, the write was not tried.
            if not isinstance(error, NotAdded) and error.metadata.get("cause") != os_errors.BUSY:
                self._doubtful.add(job.job_id)
            self.storage.report_failure(error)
            raise
        finally:
            del self._adding[job.job_id]
        if record.job_id != job.job_id:
            return await self._known(record)
        job.sequence = record.sequence
        job.mark_durable()
        if job.outcome is None:
            self._remember(job)
        else:
            job.finish(job.outcome)
            self._on_end()
        return job

    async def add_for(
        self, new: JobRecord, inputs: bytes, *, lease: tuple[int, str], quotas: Quotas = UNBOUNDED
    ) -> JobRecord:
        """Store a new job for another gateway, while that is the scheduler; see PostgresJobStore.add."""
        store = cast("PostgresJobStore", self._store)
        return await store.add(new, inputs=inputs, event_of=self._event_of, quotas=quotas, lease=lease)

    def expect(self, record: JobRecord) -> Job:
        """Create the job of a record that another gateway is about to store; reads return this object."""
        self._adding[record.job_id] = job = self._job_of(record)
        return job

    def expect_no_more(self, job: Job) -> None:
        """Forget a job that another gateway has not stored."""
        self._adding.pop(job.job_id, None)

    async def take_stored(self, job: Job, *, sequence: int, has_inputs: bool) -> bool:
        """Make an expected job, which another gateway has stored, one of this gateway's. The caller has to queue it.

        Return False if it was taken meanwhile.
        """
        if has_inputs and (inputs := await self._store.inputs(job.job_id)):
            job.spec = GenerationSpec.FromString(inputs)
        if self._adding.pop(job.job_id, None) is not job:
            return False
        job.sequence = sequence
        job.mark_durable()
        self._remember(job)
        return True

    async def find_stored(self, job_ids: Sequence[str]) -> list[JobRecord]:
        """Return the records of those jobs, of any tenant, that are stored and have not ended."""
        return await self._store.live(job_ids)

    async def discover(self, job_id: str) -> None:
        """Queue a job that another gateway has stored, if it is live and not known here."""
        if job_id not in self._live:
            for record in await self.find_stored([job_id]):
                await self._known(record)

    def save(self, job: Job) -> None:
        """Write the changeable fields of a live job in the background: attempt, deadline and decisions."""
        job_id, progress = job.job_id, progress_of(job, steady=self.storage.steady())
        self._writes.enqueue(job_id, lambda: self._store.update(job_id, lambda record: record.progressed(progress)))

    async def finish(self, job: Job) -> None:
        """Write the outcome of a job, retrying until the disk works, and then publish it."""
        decided = job.outcome
        assert decided is not None
        try:
            outcome = await self._writes.enqueue_and_wait(job.job_id, lambda: self._write(job, decided))
        except Exception as error:  # noqa: BLE001 - whatever it is, no caller may wait for ever
            # This end will never be durable, so the job has to fail.
            _log.exception("the end of a job could not be stored", extra={"job_id": job.job_id})
            why = error if isinstance(error, BottegaError) else InternalError("an internal fault")
            outcome = JobOutcome(
                state=JOB_STATE_FAILED, ended_wall=decided.ended_wall, error=why, steps_done=decided.steps_done
            )
        if self._live.get(job.job_id) is job:
            del self._live[job.job_id]
        if self._by_request_id.get(_request_key(job)) is job:
            del self._by_request_id[_request_key(job)]
        job.finish(outcome)

    def check_changeable(self, job: Job) -> None:
        """Raise StorageUnavailable if the job is read-only: its store cannot be written, or still stores it."""
        if job.live and self._live.get(job.job_id) is not job:
            text = "the job cannot be changed now, because the disk cannot be written"
            if self._adding.get(job.job_id) is job:
                text = "the job is still being stored by another gateway; retry"
            raise job.detached or StorageUnavailable(text, retry_after_s=1.0)

    async def wait_finished(self, job: Job) -> None:
        """Wait until the decided end of a job is published. Raises StorageUnavailable if that takes too long."""
        try:
            async with asyncio.timeout(_WRITTEN_S):
                await job.ended.wait()
        except TimeoutError:
            self.storage.check_writable()
            raise StorageUnavailable(
                "the job's end could not be written in time", retry_after_s=os_errors.RETRY_AFTER_S
            ) from None

    async def live_records(self) -> AsyncIterator[tuple[JobRecord, bytes]]:
        """Yield the records and inputs of all live jobs, to rebuild a store that has lost its file."""
        for job in list(self._live.values()):
            if self._live.get(job.job_id) is job:
                yield live_record_of(job, steady=self.storage.steady()), await inputs_of(job)

    def live(self) -> Iterator[Job]:
        """Return the jobs that have not ended."""
        return iter(self._live.values())

    def find_live(self, job_id: str) -> Job | None:
        """Return the stored job with this ID if this gateway schedules it and it has not ended, else None."""
        return self._live.get(job_id)

    async def get(self, job_id: str, *, tenant: str = "") -> Job:
        """Return a tenant's job.

        Raises JobNotFound with the same text and after the same time, whether the job belongs to another tenant or does
        not exist.
        """
        async with self.reading():
            job = self._live.get(job_id)
            if job is None or job.request.tenant != tenant:
                record = await self._store.get(job_id, tenant=tenant)
                job = await self._known(record) if record else None
        if job is None:
            raise JobNotFound("no such job; it may have expired, or was deleted")
        return job

    async def of_request(self, request_id: str, *, tenant: str = "") -> Job | None:
        """Return the newest job of a tenant with this request_id, or None."""
        async with self.reading():
            job = self._by_request_id.get((tenant, request_id))
            if job is None:
                record = await self._store.of_request(request_id, tenant=tenant)
                job = await self._known(record) if record else None
            return job

    async def usage(self, tenant: str) -> TenantUsage:
        """Return the counts of jobs and bytes of a tenant that quotas limit."""
        async with self.reading():
            return await self._store.usage(tenant, now_wall=self._clock.wall())

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Wait until the store can be read. If it could not be opened, reads in the block raise the reason."""
        await self._wait_readable()
        try:
            yield
        except StorageUnavailable as error:
            if error.metadata.get("cause") == os_errors.NOT_OPEN:
                self.storage.check_writable()
            raise

    def read_only(self, record: JobRecord) -> Job:
        """Return a read-only job from a record."""
        job = self._job_of(record)
        if job.live:
            job.detach(self.storage.trouble or StorageUnavailable("the job cannot be watched now"))
        return job

    async def resolve_doubtful(self) -> None:
        """Find jobs that were stored although `add` failed. Resume those with a request_id, and cancel the others.

        The callers of `add` got an error. Callers with a request_id retry and find the job. If the disk fails, the next
        call of this method continues. Damaged jobs are skipped.
        """
        for job_id in list(self._doubtful):
            with contextlib.suppress(DataLoss):
                await self._resolve(job_id)
            self._doubtful.discard(job_id)

    async def _wait_readable(self) -> None:
        if self._readable.is_set():
            return
        try:
            async with asyncio.timeout(_READY_S):
                await self._readable.wait()
        except TimeoutError:
            raise StorageUnavailable("the gateway is still starting", retry_after_s=1.0) from None

    async def _resolve(self, job_id: str) -> None:
        record = await self._store.get(job_id)
        if record is None or not record.live or job_id in self._live:
            return
        if record.request_id:
            await self._known(record)
            return
        why = JobCancelled("the caller got an error and gave no request_id, so the job is cancelled")
        cancelled = JobOutcome(state=JOB_STATE_CANCELLED, ended_wall=self._clock.wall(), error=why)
        ending = self._ending(cancelled, bare=GenerationSpec.FromString(record.spec), tenant=record.tenant)
        await self._store.update(job_id, ending, event_of=self._event_of)
        self._on_end()

    async def _restored_job(self, record: JobRecord) -> Job:
        try:
            inputs = await self._store.inputs(record.job_id)
        except DataLoss:
            job = self._job_of(record)
            job.fail(DataLoss("the job's input images are damaged; send it again, with another request_id"))
            return job
        job = self._job_of(record, inputs)
        if job.state == JOB_STATE_QUEUED:
            job.fail_if_exhausted()
        return job

    async def _known(self, record: JobRecord) -> Job:
        """Return the job of a record: the one in memory if the job is live, else a read-only one."""
        if not record.live or not self.restored:
            return self.read_only(record)
        inputs = b""
        if record.job_id not in self._live and record.job_id not in self._adding:
            inputs = await self._store.inputs(record.job_id)
        job = self._live.get(record.job_id) or self._adding.get(record.job_id)
        if job is None:
            fresh = await self._store.get(record.job_id)  # it may have ended since it was read
            job = self._live.get(record.job_id)
            if job is None:
                job = self._job_of(fresh or record, inputs)
                if job.live:
                    self._remember(job)
                    self._found.put_nowait(job)
        return job

    def _job_of(self, record: JobRecord, inputs: bytes = b"") -> Job:
        return job_of(record, inputs=inputs, life=self.life, clock=self._clock, steady=self.storage.steady())

    async def _write(self, job: Job, outcome: JobOutcome) -> JobOutcome:
        """Write an outcome, and return the stored one, which may be from an earlier try."""
        ending = self._ending(outcome, bare=job.bare, tenant=job.request.tenant, number=job.number)
        if await self._store.update(job.job_id, ending, event_of=self._event_of):
            self._on_end()
            return outcome
        record = await self._store.get(job.job_id)
        if record is None or record.live:
            raise InternalError("the job store has no attempt with this number")
        return outcome_of(record)

    def _ending(self, outcome: JobOutcome, *, bare: GenerationSpec, tenant: str, number: int = 0) -> Change:
        end = EndTime(wall=outcome.ended_wall, steady=self.storage.steady())
        return change_of(outcome, number=number, bare=bare, tenant=tenant, end=end)

    def _remember(self, job: Job) -> None:
        self._live[job.job_id] = job
        if job.request.request_id:
            self._by_request_id[_request_key(job)] = job


def _request_key(job: Job) -> tuple[str, str]:
    """Return the key by which a job is found: tenant and request_id. Two tenants may use the same request_id."""
    return job.request.tenant, job.request.request_id
