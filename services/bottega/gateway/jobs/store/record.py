"""The record of a job in the store, and how it may change: pure functions of the record.

A store reads a record, applies a change and writes the result, all in one transaction. The rules of a job's states are
those of `Job`. The rules here hold for every writer: numbers of attempts never fall, and a job ends once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

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
    kept_latents: str = ""
    result_size: tuple[int, int] = (0, 0)
    template: str = ""
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
    """Key of the requests that the pictures of a completed job answer; empty if they answer none."""
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
        """Bytes that the job adds to an answer, within some hundred bytes."""
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
