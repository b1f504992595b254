"""The jobs of this gateway: those that have not ended are in memory, and all of them in the store.

A job's acceptance and its end are durable before any caller learns of them. The progress of a running job is only in
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence

from bottega.clocks import Clock
from bottega.errors import (
    BottegaError,
    DataLoss,
    InternalError,
    JobCancelled,
    JobNotFinished,
    JobNotFound,
    StorageUnavailable,
    TooLarge,
)
from bottega.gateway.jobs.conversion import (
    answered_record_of,
    change_of,
    inputs_of,
    job_of,
    live_record_of,
    outcome_of,
    progress_of,
    record_of,
)
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.page_tokens import PageTokens
from bottega.gateway.jobs.storage import Storage, WriteQueue
from bottega.gateway.jobs.store import Change, EndTime, JobFilter, JobRecord, TenantUsage
from bottega.gateway.jobs.values import JobOutcome
from bottega.storage import os_errors
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import JOB_STATE_CANCELLED, JOB_STATE_FAILED, JOB_STATE_QUEUED

# A gateway that starts has read its jobs within this time; a caller that comes earlier waits for it.
_READY_S = 5.0

# Time for an end that was decided to be written; a healthy disk takes milliseconds.
_WRITTEN_S = 2.0

# Upper bound on a spec without its images: four prompts of 16 KiB, and names of LoRAs and ControlNets.
_MAX_SPEC_BYTES = 256 << 10

# Jobs with the same result that are looked at: older ones were drawn again because their images had gone.
_SAME_RESULT = 4

_log = logging.getLogger(__name__)


class JobRepository:
    """The jobs of a gateway. `restore` them when the storage is open.

    Every method that reads may raise StorageUnavailable and DataLoss.

    Attributes:
        storage: The disk that the jobs are on.
        restored: Whether the jobs from before a restart were read. From then on, live jobs are all in memory.
    """

    def __init__(self, *, storage: Storage, clock: Clock) -> None:
        self.storage = storage
        self._store = storage.jobs
        self._writes = WriteQueue(storage)
        self._tokens = PageTokens(storage.folder / "page_tokens.key")
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
        """Number of times that the gateway was started before."""
        return max(0, self._store.generation - 1)

    async def restore(self) -> list[Job]:
        """Return the unfinished jobs from before a restart, in their order. Queue them before anything else happens.

        A job that can no longer be drawn, for example because its input images are damaged, has an outcome already; the
        caller has to `finish` it.
        """
        jobs = [await self._restored_job(record) for record in await self._store.live()]
        for job in jobs:
            self._remember(job)
        self.restored = True
        self._readable.set()
        return jobs

    async def next_found(self) -> Job:
        """Wait for a live job that was found in the store but was not in memory. The caller has to queue it."""
        return await self._found.get()

    def allow_reads(self) -> None:
        """Allow reads although the store could not be opened. They may fail."""
        self._readable.set()

    async def close(self) -> None:
        """Finish pending writes, unless the disk fails."""
        await self._writes.close()

    async def add(self, job: Job, *, replaces: str = "") -> Job:
        """Make a new job durable and return it, or return the job that has its request_id already.

        A job whose outcome is decided has ended when this returns.

        Args:
            job: The new job.
            replaces: job_id of the ended job from which this one takes the request_id.
        """
        await self._wait_readable()
        steady = self.storage.steady()
        new = record_of(job, steady=steady) if job.outcome is None else answered_record_of(job, steady=steady)
        if len(new.spec) > _MAX_SPEC_BYTES:
            metadata = {"limit": "spec", "bytes": str(_MAX_SPEC_BYTES)}
            raise TooLarge("the request without its images is too large", metadata=metadata)
        self._adding[job.job_id] = job
        try:
            record = await self._store.add(new, inputs=await inputs_of(job), replaces=replaces)
        except (StorageUnavailable, DataLoss) as error:
            if error.metadata.get("cause") != os_errors.BUSY:  # a busy disk was not asked to write it
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
        return job

    def save(self, job: Job) -> None:
        """Write the status of a live job in the background: its attempt, deadline and decisions."""
        job_id, progress = job.job_id, progress_of(job, steady=self.storage.steady())
        self._writes.enqueue(job_id, lambda: self._store.update(job_id, lambda record: record.progressed(progress)))

    async def finish(self, job: Job) -> None:
        """Write the outcome of a job, retrying until the disk works, and then publish it."""
        decided = job.outcome
        assert decided is not None
        try:
            outcome = await self._writes.enqueue_and_wait(job.job_id, lambda: self._write(job, decided))
        except Exception as error:  # noqa: BLE001 - whatever it is, no caller may wait for ever
            # What is not durable has not happened, and this end will never be durable.
            _log.exception("the end of a job could not be written", extra={"job_id": job.job_id})
            why = error if isinstance(error, BottegaError) else InternalError("an internal fault")
            outcome = JobOutcome(
                state=JOB_STATE_FAILED, ended_wall=decided.ended_wall, error=why, steps_done=decided.steps_done
            )
        if self._live.get(job.job_id) is job:
            del self._live[job.job_id]
        if self._by_request_id.get(_request_key(job)) is job:
            del self._by_request_id[_request_key(job)]
        job.finish(outcome)

    async def delete(self, job_id: str, *, tenant: str = "") -> None:
        """Delete a tenant's job that has ended, and its pictures, durably. A repeated call is harmless.

        Raises:
            JobNotFinished: If it has not ended.
            JobNotFound: If the tenant has no such job and has deleted none.
            StorageUnavailable: If the disk cannot be written now. The job or pictures of it may be there still; a
                repeated call removes them.
        """
        try:
            if (await self.get(job_id, tenant=tenant)).live:
                raise JobNotFinished("the job has not ended: cancel it first")
        except JobNotFound:
            with self._explained():
                if not await self._store.was_deleted(job_id, tenant=tenant):
                    raise
        # A picture that another job is about to have stays: one that is pinned now or decided, or that is put or
        # renewed from now on. A job that was stored before is found in the store.
        began = self.storage.images.steady()
        needed = self.storage.images.pins | self._decided_contents()
        try:
            for content in await self._store.delete(job_id, tenant=tenant, steady=self.storage.steady()) or ():
                if content not in needed:
                    await self.storage.images.release(content, owner=tenant, put_before=began)
        except (StorageUnavailable, DataLoss) as error:
            self.storage.report_failure(error)
            raise

    def check_changeable(self, job: Job) -> None:
        """Raise StorageUnavailable for a live job that was read from a store that cannot be written."""
        if job.live and self._live.get(job.job_id) is not job:
            raise job.detached or StorageUnavailable("the job cannot be changed now", retry_after_s=1.0)

    async def wait_finished(self, job: Job) -> None:
        """Return when a job whose end was decided has ended. Raises StorageUnavailable if that takes too long."""
        try:
            await asyncio.wait_for(job.ended.wait(), _WRITTEN_S)
        except TimeoutError:
            self.storage.check_writable()
            raise StorageUnavailable(
                "the disk did not write the job's end in time", retry_after_s=os_errors.RETRY_AFTER_S
            ) from None

    async def live_records(self) -> AsyncIterator[tuple[JobRecord, bytes]]:
        """Yield the records and inputs of the jobs that have not ended, to rebuild a store that has lost its file."""
        for job in list(self._live.values()):
            if self._live.get(job.job_id) is job:
                yield live_record_of(job, steady=self.storage.steady()), await inputs_of(job)

    def live(self) -> Iterator[Job]:
        """Return the jobs that have not ended."""
        return iter(self._live.values())

    def find_live(self, job_id: str) -> Job | None:
        """Return the job if it has not ended."""
        return self._live.get(job_id)

    async def get(self, job_id: str, *, tenant: str = "") -> Job:
        """Return a tenant's job.

        Raises JobNotFound, with the same text and after the same time whether the job belongs to another tenant or does
        not exist.
        """
        await self._wait_readable()
        job = self._live.get(job_id)
        if job is None or job.request.tenant != tenant:
            with self._explained():
                record = await self._store.get(job_id, tenant=tenant)
            job = await self._known(record) if record else None
        if job is None:
            raise _not_found()
        return job

    async def of_request(self, request_id: str, *, tenant: str = "") -> Job | None:
        """Return the newest job of a tenant's idempotency key, or None."""
        await self._wait_readable()
        job = self._by_request_id.get((tenant, request_id))
        if job is None:
            with self._explained():
                record = await self._store.of_request(request_id, tenant=tenant)
            job = await self._known(record) if record else None
        return job

    async def usage(self, tenant: str) -> TenantUsage:
        """Return the numbers of a tenant that quotas bound."""
        await self._wait_readable()
        with self._explained():
            return await self._store.usage(tenant, now_wall=self._clock.wall())

    async def with_result(self, result_key: str) -> list[Job]:
        """Return the newest jobs that completed with that key, read-only and newest first."""
        await self._wait_readable()
        with self._explained():
            records = await self._store.with_result(result_key, limit=_SAME_RESULT)
        return [self._read_only(record) for record in records]

    async def with_kept_picture(self, digest: str, *, tenant: str = "") -> list[Job]:
        """Return the newest jobs of a tenant that keep latents of a picture, read-only and newest first."""
        await self._wait_readable()
        with self._explained():
            records = await self._store.with_kept_picture(digest, tenant=tenant, limit=_SAME_RESULT)
        return [self._read_only(record) for record in records]

    async def page(self, wanted: JobFilter, *, size: int, max_bytes: int, token: str) -> tuple[list[Job], str]:
        """Return jobs, newest first, and the token of the next page ("" on the last).

        Args:
            wanted: Which jobs the list holds.
            size: Upper bound on the jobs of the page.
            max_bytes: Upper bound on the size of their records; the first one is on the page however large it is.
            token: The token of this page, or "" for the first one.

        Raises:
            InvalidRequest: If the token was not given out.
        """
        newest = self._tokens.sequence_of(token, tenant=wanted.tenant) if token else None
        await self._wait_readable()
        with self._explained():
            records = await self._store.page(wanted, size=size + 1, before_sequence=newest)
        page = list(_first(records[:size], max_bytes))
        jobs = [self._live.get(record.job_id) or self._read_only(record) for record in page]
        # The store may be some milliseconds behind.
        matching = [job for job in jobs if not wanted.states or job.state in wanted.states]
        more = len(records) > len(page)
        return matching, self._tokens.token_of(page[-1].sequence, tenant=wanted.tenant) if more else ""

    async def resolve_doubtful(self) -> None:
        """Find jobs that were written although `add` failed. Resume those with a request_id, and cancel the others.

        The callers of `add` got an error. With a request_id, they retry and find the job. If the disk fails, the next
        call continues; damaged jobs are skipped.
        """
        for job_id in list(self._doubtful):
            with contextlib.suppress(DataLoss):
                await self._resolve(job_id)
            self._doubtful.discard(job_id)

    async def _wait_readable(self) -> None:
        if self._readable.is_set():
            return
        try:
            await asyncio.wait_for(self._readable.wait(), _READY_S)
        except TimeoutError:
            raise StorageUnavailable("the gateway is still starting", retry_after_s=1.0) from None

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Replace the error of a read in the block by the reason why the store is not open yet, if it is not."""
        try:
            yield
        except StorageUnavailable as error:
            if error.metadata.get("cause") == os_errors.NOT_OPEN:
                self.storage.check_writable()
            raise

    async def _resolve(self, job_id: str) -> None:
        record = await self._store.get(job_id)
        if record is None or not record.live or job_id in self._live:
            return
        if record.request_id:
            await self._known(record)
            return
        why = JobCancelled("its caller was told that it could not be stored")
        cancelled = JobOutcome(state=JOB_STATE_CANCELLED, ended_wall=self._clock.wall(), error=why)
        await self._store.update(
            job_id, self._ending(cancelled, bare=GenerationSpec.FromString(record.spec), tenant=record.tenant)
        )

    async def _restored_job(self, record: JobRecord) -> Job:
        try:
            inputs = await self._store.inputs(record.job_id)
        except DataLoss:
            job = job_of(record, life=self.life, clock=self._clock, steady=self.storage.steady())
            job.fail(DataLoss("the job's input images are damaged; send it again, with another request_id"))
            return job
        job = job_of(record, inputs=inputs, life=self.life, clock=self._clock, steady=self.storage.steady())
        if job.state == JOB_STATE_QUEUED:
            job.fail_if_exhausted()
        return job

    async def _known(self, record: JobRecord) -> Job:
        """Return the job of a record that was read: the one in memory if it is live."""
        if not record.live or not self.restored:
            return self._read_only(record)
        inputs = b""
        if record.job_id not in self._live and record.job_id not in self._adding:
            inputs = await self._store.inputs(record.job_id)
        job = self._live.get(record.job_id) or self._adding.get(record.job_id)
        if job is None:
            fresh = await self._store.get(record.job_id)  # it may have ended since it was read
            job = self._live.get(record.job_id)
            if job is None:
                job = job_of(
                    fresh or record, inputs=inputs, life=self.life, clock=self._clock, steady=self.storage.steady()
                )
                if job.live:
                    self._remember(job)
                    self._found.put_nowait(job)
        return job

    def _read_only(self, record: JobRecord) -> Job:
        """Return the job as it was written, read-only."""
        job = job_of(record, life=self.life, clock=self._clock, steady=self.storage.steady())
        if job.live:
            job.detach(self.storage.trouble or StorageUnavailable("the job cannot be followed now"))
        return job

    async def _write(self, job: Job, outcome: JobOutcome) -> JobOutcome:
        """Write an outcome. Return the one that is stored, which may be that of an earlier try."""
        ending = self._ending(outcome, bare=job.bare, tenant=job.request.tenant, number=job.number)
        if await self._store.update(job.job_id, ending):
            return outcome
        record = await self._store.get(job.job_id)
        if record is None or record.live:
            raise InternalError("the store has no such attempt")
        return outcome_of(record)

    def _ending(self, outcome: JobOutcome, *, bare: GenerationSpec, tenant: str, number: int = 0) -> Change:
        end = EndTime(wall=outcome.ended_wall, steady=self.storage.steady())
        return change_of(outcome, number=number, bare=bare, tenant=tenant, end=end)

    def _decided_contents(self) -> set[str]:
        """Return the digests of the contents of jobs whose completion is decided but not written yet."""
        outcomes = [job.outcome for job in self._live.values() if job.outcome is not None]
        return {digest for outcome in outcomes for image in outcome.images for digest in image.contents}

    def _remember(self, job: Job) -> None:
        self._live[job.job_id] = job
        if job.request.request_id:
            self._by_request_id[_request_key(job)] = job


def _first(records: Sequence[JobRecord], max_bytes: int) -> Iterator[JobRecord]:
    """Yield the first records that together have at most `max_bytes`, and at least one."""
    room = max_bytes
    for place, record in enumerate(records):
        room -= record.answer_bytes
        if room < 0 and place:
            return
        yield record


def _not_found() -> JobNotFound:
    return JobNotFound("no such job; it may have expired, or was deleted")


def _request_key(job: Job) -> tuple[str, str]:
    """Return the key by which a request_id finds a job: two tenants may use the same one."""
    return job.request.tenant, job.request.request_id
