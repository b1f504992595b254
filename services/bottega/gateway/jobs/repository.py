"""The jobs of this gateway: those that have not ended in memory, all of them in the store.

What anybody is told of an end, or of being accepted, was written before; where a running job stands is only known
here. Knows nothing of how jobs are drawn.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from bottega.errors import (
    BottegaError,
    DataLoss,
    InternalError,
    InvalidRequest,
    JobCancelled,
    JobNotFound,
    StorageUnavailable,
    Violation,
)
from bottega.gateway.clock import Clock
from bottega.gateway.jobs.brief_specs import brief
from bottega.gateway.jobs.conversion import (
    deadline_wall,
    error_of,
    inputs_of,
    job_of,
    outcome_of,
    pictures_of,
    provenance_of,
    record_of,
)
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.jobs.store import JobRecord
from bottega.gateway.jobs.values import JobOutcome
from bottega.gateway.jobs.write_queue import WriteQueue
from bottega.storage import os_errors
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import JobState

# A gateway that starts has read its jobs in less; a caller that came too early need not hear of it.
_READY_S = 5.0

# Of an end that was decided; a healthy disk takes milliseconds.
_WRITTEN_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs a list holds. states: empty is all. after, before: Unix seconds of acceptance."""

    states: Collection[JobState.ValueType] = ()
    after: float | None = None
    before: float | None = None


def _ignore(_: Job) -> None:
    """For those who do not care."""


class JobRepository:
    """`restore` it when the storehouse is open. on_found: told of a live job that nobody here knew of.

    Every method that reads may raise StorageUnavailable and DataLoss.
    """

    def __init__(self, *, storehouse: Storage, clock: Clock) -> None:
        self._storehouse = storehouse
        self._store = storehouse.jobs
        self._trails = WriteQueue(storehouse)
        self._clock = clock
        self._live: dict[str, Job] = {}
        self._adding: dict[str, Job] = {}
        self._by_request_id: dict[str, Job] = {}
        self._doubtful: set[str] = set()
        self._readable = asyncio.Event()
        self._restored = False
        self.on_found: Callable[[Job], None] = _ignore

    @property
    def restored(self) -> bool:
        """Whether the jobs of earlier lives are known, so that an unknown one is one that has ended."""
        return self._restored

    @property
    def life(self) -> int:
        """Lives of the gateway before this one."""
        return max(0, self._store.generation - 1)

    async def restore(self) -> list[Job]:
        """The jobs that an earlier life left, in their order. Line them up before anything else happens.

        Of one that cannot be drawn any more, such as with damaged input images, it is decided already that it fails;
        that is for the caller to `end`.
        """
        jobs = [await self._brought_back(record) for record in await self._store.live()]
        for job in jobs:
            self._remember(job)
        self._restored = True
        self._readable.set()
        return jobs

    def read_only(self) -> None:
        """The store cannot be opened now: what can be read of it may be."""
        self._readable.set()

    async def ready(self) -> None:
        """Returns when the jobs are there. Raises StorageUnavailable when that takes too long."""
        if self._readable.is_set():
            return
        try:
            await asyncio.wait_for(self._readable.wait(), _READY_S)
        except TimeoutError:
            raise StorageUnavailable("the gateway is still starting", retry_after_s=1.0) from None

    async def close(self) -> None:
        """Writes what waits to be written, as far as the disk lets it."""
        await self._trails.close()

    async def add(self, job: Job, *, replaces: str = "") -> Job:
        """Makes a new job durable, and returns it; or the one that has its request_id already.

        replaces: job_id of the ended job that this one takes the request_id from.
        """
        await self.ready()
        self._adding[job.job_id] = job
        try:
            record = await self._store.add(record_of(job), inputs=await inputs_of(job), replaces=replaces)
        except (StorageUnavailable, DataLoss) as error:
            if (
                error.metadata.get("cause") != os_errors.BUSY
            ):  # which is said of what was not even lined up to be written
                self._doubtful.add(job.job_id)
            self._storehouse.failed(error)
            raise
        finally:
            del self._adding[job.job_id]
        if record.job_id != job.job_id:
            return await self._recalled(record)
        job.sequence = record.sequence
        job.acknowledged()
        self._remember(job)
        return job

    def begun(self, job: Job) -> None:
        """A worker has the job; it is not kept waiting until that is written."""
        job_id, number, started_wall = job.job_id, job.number, job.started_wall or self._clock.wall()
        self._trails.note(job_id, lambda: self._store.begin(job_id, number, started_wall=started_wall))

    def waits_again(self, job: Job) -> None:
        """The attempt is lost, or was given back."""
        job_id, number, deaths = job.job_id, job.number, job.deaths
        self._trails.note(job_id, lambda: self._store.requeue(job_id, number, deaths=deaths))

    def dressed(self, job: Job) -> None:
        """The LoRAs go in at a step; the worker, which goes on, is not kept waiting until that is written."""
        job_id, number, step = job.job_id, job.number, job.loras_step
        assert step is not None
        self._trails.note(job_id, lambda: self._store.dress(job_id, number, loras_step=step))

    def extended(self, job: Job) -> None:
        """The job has more time; nobody is kept waiting until that is written."""
        job_id, until_wall = job.job_id, deadline_wall(job)
        self._trails.note(job_id, lambda: self._store.extend(job_id, until_wall), newest_of="deadlines")

    async def end(self, job: Job) -> None:
        """Writes how the job ends, and tells it then; while the disk cannot take it, it is not told."""
        decided = job.outcome
        assert decided is not None
        try:
            outcome = await self._trails.written(job.job_id, lambda: self._write(job, decided))
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody shall wait for ever
            # What is not durable has not happened, and this will never be.
            _log.exception("the end of a job could not be written", extra={"job_id": job.job_id})
            why = error if isinstance(error, BottegaError) else InternalError("an internal fault")
            outcome = JobOutcome(state=image_pb2.JOB_STATE_FAILED, ended_wall=decided.ended_wall, error=why)
        if self._live.get(job.job_id) is job:
            del self._live[job.job_id]
        if self._by_request_id.get(job.request_id) is job:
            del self._by_request_id[job.request_id]
        job.end(outcome)

    def refuse_copy(self, job: Job) -> None:
        """Raises StorageUnavailable for a live job that is here for looking at only: nothing can be decided of it."""
        if job.live and self._live.get(job.job_id) is not job:
            raise job.left or StorageUnavailable("the job cannot be changed now", retry_after_s=1.0)

    async def written(self, job: Job) -> None:
        """Returns when a job whose end was decided has ended. Raises StorageUnavailable when that takes too long."""
        try:
            await asyncio.wait_for(job.ended.wait(), _WRITTEN_S)
        except TimeoutError:
            self._storehouse.check()
            raise StorageUnavailable("the disk takes long", retry_after_s=os_errors.RETRY_AFTER_S) from None

    async def get(self, job_id: str) -> Job:
        """The job. Raises JobNotFound."""
        await self.ready()
        job = self._live.get(job_id)
        if job is None:
            with self._told_why():
                record = await self._store.get(job_id)
            job = await self._recalled(record) if record else None
        if job is None:
            raise JobNotFound("no such job; it may have expired")
        return job

    def find(self, job_id: str) -> Job | None:
        """The job, if it has not ended."""
        return self._live.get(job_id)

    async def of_request(self, request_id: str) -> Job | None:
        """The newest job of an idempotency key, or None."""
        await self.ready()
        job = self._by_request_id.get(request_id)
        if job is None:
            with self._told_why():
                record = await self._store.of_request(request_id)
            job = await self._recalled(record) if record else None
        return job

    def live(self) -> Iterator[Job]:
        """Jobs that have not ended."""
        return iter(self._live.values())

    async def page(self, wanted: JobFilter, *, size: int, token: str) -> tuple[list[Job], str]:
        """Up to `size` jobs, newest first, and the token of the next page ("" on the last).

        Raises InvalidRequest for a token that was not given out.
        """
        newest = _sequence_of(token) if token else None
        await self.ready()
        with self._told_why():
            records = await self._store.page(
                size=size + 1,
                states=wanted.states,
                created_after=wanted.after,
                created_before=wanted.before,
                before_sequence=newest,
            )
        jobs = [self._live.get(record.job_id) or self._as_read(record) for record in records[:size]]
        # What is written may be some milliseconds behind.
        admitted = [job for job in jobs if not wanted.states or job.state in wanted.states]
        return admitted, _token_of(records[size - 1].sequence) if len(records) > size else ""

    async def settle_doubts(self) -> None:
        """Looks for jobs that were written though that failed: one with a request_id goes on, another is cancelled.

        Its caller was refused; with a request_id it comes again and finds it. What the disk did not let come to an end
        is looked for again at the next call; what is damaged is left alone.
        """
        for job_id in list(self._doubtful):
            with contextlib.suppress(DataLoss):
                await self._settle(job_id)
            self._doubtful.discard(job_id)

    @contextlib.contextmanager
    def _told_why(self) -> Iterator[None]:
        """In the block the store is read: a caller that comes before it is open hears what keeps it from that."""
        try:
            yield
        except StorageUnavailable as error:
            if error.metadata.get("cause") == os_errors.NOT_OPEN:
                self._storehouse.check()
            raise

    async def _settle(self, job_id: str) -> None:
        record = await self._store.get(job_id)
        if record is None or not record.live or job_id in self._live:
            return
        if record.request_id:
            await self._recalled(record)
            return
        await self._store.fail(
            job_id,
            None,
            error=error_of(JobCancelled("its caller was told that it could not be stored")),
            state=image_pb2.JOB_STATE_CANCELLED,
            ended_wall=self._clock.wall(),
            ended_steady=self._storehouse.steady(),
            spec=brief(GenerationSpec.FromString(record.spec)).SerializeToString(),
        )

    async def _brought_back(self, record: JobRecord) -> Job:
        try:
            inputs = await self._store.inputs(record.job_id)
        except DataLoss:
            job = job_of(record, life=self.life, clock=self._clock)
            job.fail(DataLoss("the job's input images are damaged; send it again, with another request_id"))
            return job
        job = job_of(record, inputs=inputs, life=self.life, clock=self._clock)
        if job.state == image_pb2.JOB_STATE_QUEUED:
            job.give_up()
        return job

    async def _recalled(self, record: JobRecord) -> Job:
        """The job of a record that was read: the one in memory where it is live."""
        if not record.live or not self._restored:
            return self._as_read(record)
        inputs = b""
        if record.job_id not in self._live and record.job_id not in self._adding:
            inputs = await self._store.inputs(record.job_id)
        job = self._live.get(record.job_id) or self._adding.get(record.job_id)
        if job is None:
            fresh = await self._store.get(record.job_id)  # it may have ended since it was read
            job = self._live.get(record.job_id)
            if job is None:
                job = self._found(fresh or record, inputs)
        return job

    def _found(self, record: JobRecord, inputs: bytes) -> Job:
        job = job_of(record, inputs=inputs, life=self.life, clock=self._clock)
        if job.live:
            self._remember(job)
            self.on_found(job)
        return job

    def _as_read(self, record: JobRecord) -> Job:
        """The job as it was written, for looking at only."""
        job = job_of(record, life=self.life, clock=self._clock)
        if job.live:
            job.leave(self._storehouse.trouble or StorageUnavailable("the job cannot be followed now"))
        return job

    async def _write(self, job: Job, outcome: JobOutcome) -> JobOutcome:
        """Writes an end; returns the one that holds, which another try may have written already."""
        job_id, cancelled = job.job_id, outcome.state == image_pb2.JOB_STATE_CANCELLED
        if outcome.state == image_pb2.JOB_STATE_COMPLETED:
            wrote = await self._store.complete(
                job_id,
                job.number,
                pictures=pictures_of(outcome),
                provenance=provenance_of(outcome),
                ended_wall=outcome.ended_wall,
                ended_steady=self._storehouse.steady(),
            )
        else:
            wrote = await self._store.fail(
                job_id,
                None,
                error=error_of(outcome.error),
                state=outcome.state,
                ended_wall=outcome.ended_wall,
                ended_steady=self._storehouse.steady(),
                spec=brief(job.bare).SerializeToString() if cancelled else None,
            )
        if wrote:
            return outcome
        record = await self._store.get(job_id)
        if record is None or record.live:
            raise InternalError("the store does not know of this attempt")
        return outcome_of(record)

    def _remember(self, job: Job) -> None:
        self._live[job.job_id] = job
        if job.request_id:
            self._by_request_id[job.request_id] = job


def _token_of(sequence: int) -> str:
    return base64.urlsafe_b64encode(sequence.to_bytes(8, "big")).decode()


def _sequence_of(token: str) -> int:
    try:
        raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    sequence = int.from_bytes(raw, "big")
    if len(raw) != 8 or sequence >= 1 << 63:
        rule = "must be the next_page_token of an earlier answer"
        raise InvalidRequest(f"page_token: {rule}", violations=[Violation(field="page_token", description=rule)])
    return sequence
