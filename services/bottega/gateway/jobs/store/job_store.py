"""The job store: its records, how a record may change, and the guarantees of every store.

A store reads a record, applies a change and writes the result, all in one transaction. Changes are pure functions of
the record. `Job` has the rules of a job's states. The rules here hold for every writer: attempt numbers never fall, and
a job ends once. The conformance tests check the guarantees for each implementation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from pydantic import ConfigDict

from bottega.errors import StorageUnavailable
from bottega.gateway.jobs.store.outbox import Outbox, OutboxEvent
from bottega.gateway.jobs.store.quotas import TenantUsage
from bottega.gateway.jobs.values import StoredImage
from bottega.rpc.security.tenant_file import UNBOUNDED, Quotas
from bottega.v1 import image_pb2
from bottega.v1.image_pb2 import JobState, Priority

LIVE = frozenset({image_pb2.JOB_STATE_QUEUED, image_pb2.JOB_STATE_RUNNING})
# States whose request_id a new job may take over. Cancelled jobs keep theirs: the caller did not want the job.
_REPLACEABLE = frozenset({image_pb2.JOB_STATE_FAILED, image_pb2.JOB_STATE_COMPLETED})


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTime:
    """The time at which a job ended."""

    wall: float
    """Unix time in seconds, to show to people."""
    steady: float
    """Time in seconds on the steady clock, by which ended jobs expire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """The fields of a live job that change until it ends; see JobRecord."""

    state: JobState.ValueType
    deadline_steady: float | None = None
    started_wall: float | None = None
    attempt: int = 0
    """Number of the newest attempt; 0 before the first one."""
    deaths: int = 0
    decisions: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedJobs:
    """The record of jobs that a store does not have any more: deletions, and counts for quotas."""

    deletions: Sequence[tuple[str, str, str, float]]
    """Job ID, tenant, the digests of the job's contents as a JSON list, and time on the steady clock, oldest first."""
    accepted: Mapping[tuple[str, int], int]
    """Number of jobs accepted by tenant and day since 1970, of at least today and yesterday; for quotas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """The filter of a job list."""

    tenant: str = ""
    """The tenant whose jobs are listed; "" is the only tenant of a gateway without API keys."""
    states: Collection[JobState.ValueType] = ()
    """The job states to list; empty means all."""
    created_after: float | None = None
    """Earliest time of acceptance, in Unix seconds; None means no bound."""
    created_before: float | None = None
    """Unix time in seconds before which a listed job was accepted; None means no bound."""


ALL_JOBS = JobFilter()
"""All jobs of a gateway without API keys, which has a single tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The record of a job in the store. Times whose names end in `_wall` are in Unix seconds.

    Fields that JobRequest has as well are documented there.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    job_id: str
    fingerprint: str
    spec: bytes
    """Serialized GenerationSpec, without its input images."""
    created_wall: float
    request_id: str = ""
    log_id: str = ""
    ends_with_caller: bool = False
    priority: Priority.ValueType = image_pb2.PRIORITY_NORMAL
    tenant: str = ""
    peer: str = ""
    shape: tuple[int, int] = (0, 0)
    evaluations_per_step: float = 1.0
    keeps_steps: bool = False
    image_digest: str = ""
    mask_digest: str = ""
    kept_digest: str = ""
    result_size: tuple[int, int] = (0, 0)
    edit_source: str = ""
    computed_share: float = 1.0
    size_bytes: int = 0
    deadline_steady: float | None = None
    """The job's deadline, on the steady clock; None if it has none."""
    state: JobState.ValueType = image_pb2.JOB_STATE_QUEUED
    started_wall: float | None = None
    ended_wall: float | None = None
    ended_steady: float | None = None
    """Time at which the job ended, on the steady clock (see EndTime); None while it is live."""
    attempt: int = 0
    """Number of the newest attempt; 0 before the first one."""
    webhook: bytes = b""
    deaths: int = 0
    """Number of workers that died while they ran this job alone."""
    decisions: bytes = b""
    """Serialized AttemptDecisions."""
    images: tuple[StoredImage, ...] = ()
    provenance: bytes = b""
    """Serialized Provenance; empty if there is none."""
    error: bytes = b""
    """Serialized JobError; empty if the job has none."""
    result_key: str = ""
    """Key of the requests that the images of a completed job may answer (see `result_key`); "" if there are none."""
    steps_done: int = 0
    """Number of denoising steps that a failed or cancelled job had completed."""
    sequence: int = 0
    """Number of the job in order of arrival; the store assigns it."""

    @property
    def picture_bytes(self) -> int:
        """Total bytes of the job's images, and of the latents that are kept for edits."""
        return sum(image.size_bytes + image.latents_bytes for image in self.images)

    @property
    def answer_bytes(self) -> int:
        """Approximate number of bytes that the job adds to a response, to within a few hundred."""
        return len(self.spec) + len(self.provenance) + len(self.error) + len(self.webhook)

    @property
    def live(self) -> bool:
        """Whether the job has not ended."""
        return self.state in LIVE

    @property
    def contents(self) -> tuple[str, ...]:
        """Digests of the job's images and of the latents that are kept for edits, without duplicates."""
        return tuple(dict.fromkeys(digest for image in self.images for digest in image.contents))

    @property
    def kept_pictures(self) -> frozenset[str]:
        """Digests of the job's images whose latents are kept for edits."""
        return frozenset(image.digest for image in self.images if image.latents)

    def progressed(self, progress: JobProgress) -> JobRecord | None:
        """Return the record with a new status, or None if the job has ended or a later attempt is known.

        The time at which the first attempt started is kept.
        """
        if not self.live or progress.attempt < self.attempt:
            return None
        return replace(
            self,
            state=progress.state,
            deadline_steady=progress.deadline_steady,
            started_wall=progress.started_wall if self.started_wall is None else self.started_wall,
            attempt=progress.attempt,
            deaths=progress.deaths,
            decisions=progress.decisions,
        )

    def completed(
        self, attempt: int, *, images: tuple[StoredImage, ...], provenance: bytes, end: EndTime, result_key: str = ""
    ) -> JobRecord | None:
        """Return the record of the job as completed, or None if `attempt` is not the running attempt."""
        if self.state != image_pb2.JOB_STATE_RUNNING or attempt != self.attempt:
            return None
        return self._end(
            image_pb2.JOB_STATE_COMPLETED, end, images=images, provenance=provenance, result_key=result_key
        )

    def answered(
        self, *, images: tuple[StoredImage, ...], provenance: bytes, end: EndTime, result_key: str
    ) -> JobRecord:
        """Return the record of a new job as completed with the result of an identical job."""
        assert self.live
        assert self.sequence == 0
        return self._end(
            image_pb2.JOB_STATE_COMPLETED, end, images=images, provenance=provenance, result_key=result_key
        )

    def failed(self, *, error: bytes, end: EndTime, steps_done: int = 0) -> JobRecord | None:
        """Return the record of the job as failed, or None if it has ended already."""
        ended = self._end(image_pb2.JOB_STATE_FAILED, end, error=error, steps_done=steps_done)
        return ended if self.live else None

    def cancelled(self, *, error: bytes, end: EndTime, spec: bytes, steps_done: int = 0) -> JobRecord | None:
        """Return the record of the job as cancelled, with a shortened `spec`, or None if it has ended already."""
        ended = self._end(image_pb2.JOB_STATE_CANCELLED, end, error=error, spec=spec, steps_done=steps_done)
        return ended if self.live else None

    def is_replaced_by(self, other: JobRecord, *, replaces: str) -> bool:
        """Return whether a new job of the same tenant may take over the request_id of this ended job."""
        return self.state in _REPLACEABLE and replaces == self.job_id != other.job_id

    def _end(self, state: JobState.ValueType, end: EndTime, **results: Any) -> JobRecord:
        return replace(self, state=state, ended_wall=end.wall, ended_steady=end.steady, **results)


Change = Callable[[JobRecord], JobRecord | None]
"""Returns the changed record, or None if nothing changes. It is pure, because a store may call it twice."""

EventOf = Callable[[JobRecord], OutboxEvent | None]
"""Returns the webhook event of a job that has just ended, or None. It is pure, as a Change is."""


def no_event(record: JobRecord) -> None:
    """Return None: no webhook hears of the end of this job."""
    del record


class StaleGeneration(StorageUnavailable):
    """A write was refused because another gateway has become the scheduler. Nothing was written, nor will be."""

    CAUSE: ClassVar[str] = "STALE_GENERATION"
    """`cause` in its metadata, by which other gateways recognize it."""

    def __init__(self, generation: int) -> None:
        metadata = {"cause": self.CAUSE, "generation": str(generation)}
        super().__init__("another gateway is the scheduler now", metadata=metadata, retry_after_s=1.0)


class NotAdded(StorageUnavailable):
    """A job was not added to the store, and certainly will not be: its transaction ended before the commit began."""


class JobStore(Protocol):
    """A store of jobs, which outlive the gateway process.

    - A change is durable when its method returns. Every later read sees it, through any store object with the same
      jobs.
    - A job ends once: of several changes that would end it, from any store objects, one takes effect.
    - Every method may raise StorageUnavailable if the disk is full or cannot be used. The change may have happened or
      not, and the call may be repeated. Reads still work if they can.
    - Every method may raise DataLoss because of damage, and then returns nothing. Once the whole store is known to be
      damaged, nothing is written. A job that is found is still valid. A search that finds nothing raises DataLoss, and
      so does every list.
    - While the store as a whole is sound, a damaged job does not affect others: lists omit it, the log names it, and it
      is left as it is. Reading it raises DataLoss.
    - A cancelled call may have taken effect. A caller that must know awaits it to its end (asyncio.shield).
    """

    @property
    def generation(self) -> int:
        """Number of this start of the gateway, larger than that of every earlier start; 0 before `open`."""

    @property
    def outbox(self) -> Outbox:
        """The webhook events of the store's jobs."""

    async def open(self) -> None:
        """Create the store or check it. Callers may repeat this until it succeeds.

        After StorageUnavailable and DataLoss, reads work as far as they can.

        Raises:
            DataLoss: If it is damaged; the error says what to do.
            ConfigError: If it belongs to another version or another program.
        """

    async def open_to_read(self) -> None:
        """Make reads work as far as they can, without writing anything; `open` may follow.

        Raises the errors of `open`. Does nothing if there is no store yet.
        """

    async def close(self) -> None:
        """Finish the operations that have begun, and close the store."""

    @property
    def lost(self) -> bool:
        """Whether the open store has lost its files. Methods raise StorageUnavailable until `remake` succeeds."""

    async def remake(self, live: AsyncIterator[tuple[JobRecord, bytes]]) -> None:
        """Create a lost store again, with these live jobs and their inputs. Does nothing if the store is not lost.

        It may be called again after it failed.
        """

    async def add(
        self,
        record: JobRecord,
        *,
        inputs: bytes = b"",
        replaces: str = "",
        event_of: EventOf = no_event,
        quotas: Quotas = UNBOUNDED,
    ) -> JobRecord:
        """Add a job that is queued or already completed, and return it with its sequence number.

        If a job with its job_id or its tenant's request_id is stored, nothing is added and the stored job is returned:
        compare its job_id and its fingerprint.

        Args:
            record: The job.
            inputs: The serialized complete GenerationSpec if the job has input images; stored until the job ends.
            replaces: ID of the ended job whose request_id the new job takes over, because it failed or its images are
                deleted; "" if there is none.
            event_of: Makes the event to write to the outbox if the job is added and has ended.
            quotas: Quotas of the job's tenant. They hold over all stores that add jobs of a tenant at the same time.

        Raises:
            QuotaExceeded: If a new job would exceed one of them; nothing is added.
        """

    async def update(self, job_id: str, change: Change, *, event_of: EventOf = no_event) -> bool:
        """Apply `change` to a job and write the result. Return whether anything changed; False for an unknown job.

        When a job ends, its inputs are deleted, and its event is written to the outbox.
        """

    async def delete(self, job_id: str, *, tenant: str = "", steady: float) -> list[str] | None:
        """Delete an ended job of a tenant, with its request_id. Its event stays in the outbox until it is delivered.

        A repeated call gives the same answer as long as deletions are remembered: the newest 10,000, until `forget` is
        called with an `ended_before` later than `steady`.

        Args:
            job_id: ID of the job.
            tenant: The tenant to which the job must belong.
            steady: The current time of the steady clock.

        Returns:
            Digests of the job's images and kept latents that no other job of its tenant has. None if there is and was
            no such job, or if it has not ended.
        """

    async def was_deleted(self, job_id: str, *, tenant: str = "") -> bool:
        """Return whether a job of that tenant was deleted and its deletion is still remembered."""

    async def get(self, job_id: str, *, tenant: str | None = None) -> JobRecord | None:
        """Return a job, or None. The search takes as long for a job of another tenant as for a missing one.

        Args:
            job_id: ID of the job.
            tenant: The tenant to which the job must belong; None means any.
        """

    async def of_request(self, request_id: str, *, tenant: str = "") -> JobRecord | None:
        """Return the newest job of a tenant with this request_id, or None."""

    async def usage(self, tenant: str, *, now_wall: float) -> TenantUsage:
        """Return the number of jobs and bytes of a tenant in the store.

        The day begins as that of the Unix time `now_wall`, in seconds.
        """

    async def with_result(self, result_key: str, *, limit: int) -> list[JobRecord]:
        """Return up to `limit` jobs that completed with this result key, newest first; none for ""."""

    async def with_kept_picture(self, digest: str, *, tenant: str = "", limit: int) -> list[JobRecord]:
        """Return up to `limit` completed jobs of a tenant that keep latents of this image, newest first."""

    async def inputs(self, job_id: str) -> bytes:
        """Return the serialized inputs of a live job; b"" if it has none or has ended."""

    async def last_end(self) -> EndTime | None:
        """Return the latest end of a job on the steady clock, or None if no job has ended."""

    async def live(self, job_ids: Sequence[str] | None = None) -> list[JobRecord]:
        """Return all jobs that have not ended, or those with these IDs, oldest first."""

    async def contents(self) -> dict[str, set[str]]:
        """Return the tenants that own each stored image and each file of kept latents, by digest."""

    async def page(
        self, wanted: JobFilter = ALL_JOBS, *, size: int, before_sequence: int | None = None
    ) -> list[JobRecord]:
        """Return up to `size` of the wanted jobs, newest first, before a sequence number; None means the newest."""

    async def forget(self, *, ended_before: float, max_jobs: int, max_bytes: int, limit: int) -> int:
        """Delete up to `limit` ended jobs and return how many. Call it again while that equals `limit`.

        First, jobs that ended before `ended_before` are deleted, the earliest end first. Then further ended jobs are
        deleted until at most `max_jobs` are left, including live ones, and their records take at most `max_bytes`:
        cancelled and failed jobs first, completed ones only when there are no others. The next job to delete is the one
        that ended first among the jobs of the peer with the most jobs (with the most bytes once the number of jobs is
        within its bound; of two equal peers, the first by name). So a peer that submits many jobs loses its own jobs,
        not those of others.
        """

    async def probe(self) -> None:
        """Test the disk with a write that changes nothing. Returns when that has succeeded."""
