"""The job store: its records, how a record may change, and the promises that every store keeps.

A store reads a record, applies a change and writes the result, all in one transaction. Changes are pure functions of
the record. The rules of a job's states are those of `Job`; the rules here hold for every writer: numbers of attempts
never fall, and a job ends once. The conformance tests check the promises for each implementation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from bottega.gateway.jobs.values import StoredImage
from bottega.v1 import image_pb2
from bottega.v1.image_pb2 import JobState, Priority

LIVE = frozenset({image_pb2.JOB_STATE_QUEUED, image_pb2.JOB_STATE_RUNNING})
# A cancelled job is not among them: its request_id keeps meaning that the caller did not want it.
_REPLACEABLE = frozenset({image_pb2.JOB_STATE_FAILED, image_pb2.JOB_STATE_COMPLETED})


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTime:
    """The time at which a job ended."""

    wall: float
    """Unix seconds, for people."""
    steady: float
    """Seconds on the clock that decides when it is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """The status of a live job, which changes until it ends; see JobRecord."""

    state: JobState.ValueType
    deadline_steady: float | None = None
    started_wall: float | None = None
    attempt: int = 0
    """Number of the newest attempt, 0 before the first."""
    deaths: int = 0
    decisions: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """A tenant's jobs and bytes in the store."""

    jobs_today: int = 0
    """Number of jobs since midnight UTC, forgotten ones included."""
    stored_bytes: int = 0
    """Bytes of the pictures of remembered jobs, and of the latents that are kept for edits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """The filter of a list of jobs."""

    tenant: str = ""
    """The tenant whose jobs are listed."""
    states: Collection[JobState.ValueType] = ()
    """The states that are listed; empty means all."""
    created_after: float | None = None
    """Earliest time of acceptance, in Unix seconds."""
    created_before: float | None = None
    """Time in Unix seconds before which the jobs were accepted."""


ALL_JOBS = JobFilter()
"""All jobs of a gateway without keys, which has one tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The record of a job. Times whose names end in `_wall` are in Unix seconds.

    Fields that JobRequest has as well are documented there.
    """

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
    """Time at which the job ended, on the steady clock; see EndTime."""
    attempt: int = 0
    """Number of the newest attempt, 0 before the first."""
    deaths: int = 0
    """Number of workers that died while they ran this job alone."""
    decisions: bytes = b""
    """Serialized AttemptDecisions."""
    images: tuple[StoredImage, ...] = ()
    provenance: bytes = b""
    """Serialized Provenance; empty if there is none."""
    error: bytes = b""
    """Serialized JobError; empty if there is none."""
    result_key: str = ""
    """The `result_key` of the requests that the pictures of a completed job may answer; empty if there are none."""
    steps_done: int = 0
    """Denoising steps that a failed or cancelled job had made."""
    sequence: int = 0
    """Number of the job in order of arrival, given by the store."""

    @property
    def picture_bytes(self) -> int:
        """Bytes of the job's pictures, and of the latents that are kept for edits."""
        return sum(image.size_bytes + image.latents_bytes for image in self.images)

    @property
    def answer_bytes(self) -> int:
        """Bytes that the job adds to a response, to within a few hundred bytes."""
        return len(self.spec) + len(self.provenance) + len(self.error)

    @property
    def live(self) -> bool:
        """Whether the job has not ended."""
        return self.state in LIVE

    @property
    def contents(self) -> tuple[str, ...]:
        """Digests of the job's pictures and of the latents that are kept for edits, each once."""
        return tuple(dict.fromkeys(digest for image in self.images for digest in image.contents))

    @property
    def kept_pictures(self) -> frozenset[str]:
        """Digests of the job's pictures whose latents are kept for edits."""
        return frozenset(image.digest for image in self.images if image.latents)

    def progressed(self, progress: JobProgress) -> JobRecord | None:
        """Return the record with a new status, or None if the job has ended or a later attempt is known.

        The start of the first attempt is kept.
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
        """Return the record of the job as completed, or None if the attempt is not the one that runs."""
        if self.state != image_pb2.JOB_STATE_RUNNING or attempt != self.attempt:
            return None
        return self._completed(images, provenance, end, result_key)

    def answered(
        self, *, images: tuple[StoredImage, ...], provenance: bytes, end: EndTime, result_key: str
    ) -> JobRecord:
        """Return the record of a new job as completed with the result of an identical one."""
        assert self.live
        assert self.sequence == 0
        return self._completed(images, provenance, end, result_key)

    def failed(self, *, error: bytes, end: EndTime, steps_done: int = 0) -> JobRecord | None:
        """Return the record of the job as failed, or None if it has ended before."""
        ended = self._ended(image_pb2.JOB_STATE_FAILED, end)
        return replace(ended, error=error, steps_done=steps_done) if self.live else None

    def cancelled(self, *, error: bytes, end: EndTime, spec: bytes, steps_done: int = 0) -> JobRecord | None:
        """Return the record of the job as cancelled, with a shortened `spec`, or None if it has ended before."""
        ended = self._ended(image_pb2.JOB_STATE_CANCELLED, end)
        return replace(ended, error=error, spec=spec, steps_done=steps_done) if self.live else None

    def is_replaced_by(self, other: JobRecord, *, replaces: str) -> bool:
        """Return whether a job of the same tenant and request_id takes the request_id over from this ended job."""
        return self.state in _REPLACEABLE and replaces == self.job_id != other.job_id

    def _completed(
        self, images: tuple[StoredImage, ...], provenance: bytes, end: EndTime, result_key: str
    ) -> JobRecord:
        ended = self._ended(image_pb2.JOB_STATE_COMPLETED, end)
        return replace(ended, images=images, provenance=provenance, result_key=result_key)

    def _ended(self, state: JobState.ValueType, end: EndTime) -> JobRecord:
        return replace(self, state=state, ended_wall=end.wall, ended_steady=end.steady)


Change = Callable[[JobRecord], JobRecord | None]
"""Returns the changed record, or None if nothing changes. It is pure, because a store may call it twice."""


class JobStore(Protocol):
    """A store of jobs, which outlive the gateway.

    - What a method has acknowledged by returning is durable, and every later read, by any store of the same jobs,
      sees it.
    - A job ends once: of any number of changes that would end it, from any number of stores, one takes effect.
    - Every method may raise StorageUnavailable if the disk is full or cannot be used. Then nothing was acknowledged,
      though it may have happened, and the call may be repeated. Reads go on if they can.
    - Every method may raise DataLoss because of damage, and then gives no answer. Once the whole store was seen to be
      damaged, nothing is written. A job that is found is still good; one that is not found is DataLoss, as every list
      is.
    - While the store as a whole is sound, a damaged job does not affect others: lists leave it out, the log names it,
      and it is left as it is. Reading it raises DataLoss.
    - A cancelled call may have happened. A caller that must know awaits it to its end (asyncio.shield).
    """

    @property
    def generation(self) -> int:
        """Number of this life of the gateway, larger than that of every earlier one; 0 before `open`."""

    async def open(self) -> None:
        """Create the store or check it. It may be called again until it succeeds.

        After StorageUnavailable and DataLoss, reads work as far as they can.

        Raises:
            DataLoss: If it is damaged; the error says what to do.
            ConfigError: If it is the store of another version or of something else.
        """

    async def open_to_read(self) -> None:
        """Make reads work as far as they can, without writing anything; `open` may follow.

        Raises as `open` does. Harmless if there is no store yet; none is created.
        """

    async def close(self) -> None:
        """Finish the operations that have begun, and close the store."""

    @property
    def lost(self) -> bool:
        """Whether the open store has lost its files: methods raise StorageUnavailable until `remake` succeeds."""

    async def remake(self, live: AsyncIterator[tuple[JobRecord, bytes]]) -> None:
        """Create a lost store again, with these live jobs and their inputs. Harmless if it is not lost.

        It may be called again after it failed.
        """

    async def add(self, record: JobRecord, *, inputs: bytes = b"", replaces: str = "") -> JobRecord:
        """Add a job that is queued or already completed, and return it with its sequence.

        If its job_id or its tenant's request_id is known and not forgotten, nothing is added and the known job is
        returned: compare its job_id and its fingerprint.

        Args:
            record: The job.
            inputs: The complete GenerationSpec if the job has input images; needed until the job ends.
            replaces: job_id of the failed job whose request_id this retry takes over, or of a completed one whose
                images have gone.
        """

    async def update(self, job_id: str, change: Change) -> bool:
        """Apply `change` to a job and write the result. Return whether anything changed; False for an unknown job.

        The inputs of a job that ends are removed.
        """

    async def delete(self, job_id: str, *, tenant: str = "", steady: float) -> list[str] | None:
        """Forget a tenant's job that has ended, with its request_id.

        A repeated call gives the same answer as long as deletions are remembered: the newest 10,000, until `forget`
        is called with an `ended_before` later than `steady`.

        Args:
            job_id: ID of the job.
            tenant: The tenant that the job must belong to.
            steady: The time of the call on the steady clock.

        Returns:
            Digests of its pictures, and of what was kept of them, that no other job of its tenant has. None if there is
            and was no such job, or if it has not ended.
        """

    async def was_deleted(self, job_id: str, *, tenant: str = "") -> bool:
        """Return whether a job of that tenant was deleted and its deletion is still remembered."""

    async def get(self, job_id: str, *, tenant: str | None = None) -> JobRecord | None:
        """Return a job, or None. A job of another tenant takes as long as none.

        Args:
            job_id: ID of the job.
            tenant: The tenant that it must belong to; None means any.
        """

    async def of_request(self, request_id: str, *, tenant: str = "") -> JobRecord | None:
        """Return the newest job of a tenant's idempotency key, or None."""

    async def usage(self, tenant: str, *, now_wall: float) -> TenantUsage:
        """Return a tenant's jobs and bytes in the store.

        Args:
            tenant: The tenant.
            now_wall: The time in Unix seconds, from which the start of the day is computed.
        """

    async def with_result(self, result_key: str, *, limit: int) -> list[JobRecord]:
        """Return up to `limit` jobs that completed with that key, newest first; none for an empty key."""

    async def with_kept_picture(self, digest: str, *, tenant: str = "", limit: int) -> list[JobRecord]:
        """Return up to `limit` completed jobs of a tenant that keep latents of a picture, newest first."""

    async def inputs(self, job_id: str) -> bytes:
        """Return the inputs of a live job; empty if it has none or has ended."""

    async def last_end(self) -> EndTime | None:
        """Return the latest time on the steady clock at which a job ended, or None if none has ended."""

    async def live(self) -> list[JobRecord]:
        """Return all jobs that have not ended, oldest first."""

    async def contents(self) -> dict[str, set[str]]:
        """Return the owners of each stored picture and each file of kept latents: tenants by digest."""

    async def page(
        self, wanted: JobFilter = ALL_JOBS, *, size: int, before_sequence: int | None = None
    ) -> list[JobRecord]:
        """Return up to `size` of the wanted jobs that are older than a sequence, newest first."""

    async def forget(self, *, ended_before: float, max_jobs: int, max_bytes: int, limit: int) -> int:
        """Forget up to `limit` jobs and return how many; call it again while that is `limit`.

        First, jobs that ended before `ended_before` are forgotten, the earliest end first. Then further ended jobs are
        forgotten until at most `max_jobs` are left, live ones included, and their records take at most `max_bytes`:
        cancelled and failed jobs first, completed ones only when there are no others. Each time, the job that goes is
        the one that ended first among those of the peer with the most jobs, or with the most bytes once the number of
        jobs is within its bound (of two peers with as much, the first by name). So a peer that submits many jobs loses
        its own jobs, not those of others.
        """

    async def probe(self) -> None:
        """Test the disk with a write that changes nothing. Return when it has succeeded."""
