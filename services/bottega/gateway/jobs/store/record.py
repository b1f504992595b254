"""A job as the store keeps it, and how it may change: pure functions of the record.

A store reads a record, applies a change and writes what that gives, all in one transaction. The rules of a job's states
are those of `Job`; here is only what must hold whoever writes: numbers of attempts never fall, and a job ends once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from bottega.gateway.jobs.values import StoredImage
from bottega.v1 import image_pb2
from bottega.v1.image_pb2 import JobState, Priority

LIVE = frozenset({image_pb2.JOB_STATE_QUEUED, image_pb2.JOB_STATE_RUNNING})
# A cancelled job is not among them: its request_id goes on to mean that nobody wanted it.
_REPLACEABLE = frozenset({image_pb2.JOB_STATE_FAILED, image_pb2.JOB_STATE_COMPLETED})


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTime:
    """When a job ended. wall: Unix seconds, for people. steady: on the clock that decides when it is forgotten."""

    wall: float
    steady: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """What changes of a job until it ends; see JobRecord. attempt: the newest one's number, 0 before the first."""

    state: JobState.ValueType
    deadline_wall: float | None = None
    started_wall: float | None = None
    attempt: int = 0
    deaths: int = 0
    decisions: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """What the store has of a tenant. jobs_today: new since midnight UTC, forgotten ones too. stored_bytes: of the
    pictures of those that it remembers, and of what is kept of these for edits.
    """

    jobs_today: int = 0
    stored_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs a list holds. tenant: whose; those of no other are in it. states: empty is all. Times are those of
    acceptance, in Unix seconds, at or after and before.
    """

    tenant: str = ""
    states: Collection[JobState.ValueType] = ()
    created_after: float | None = None
    created_before: float | None = None


ALL_JOBS = JobFilter()
"""Of the only tenant there is without keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job.

    ends_with_caller: a restarted gateway does not resume it. tenant, peer, priority: see JobRequest.
    spec: GenerationSpec without its input images. fingerprint: of the request as the caller sent it.
    shape: of the latent, height and width. image_digest, mask_digest, kept_latents, result_size,
    template, computed_share: see JobRequest.
    size_bytes: of the request.
    *_wall: Unix seconds; of deadline_wall those that the steady clock says. ended_steady: see EndTime.
    steps_done: denoising steps that one which failed or was cancelled had made.
    attempt: number of the newest one, 0 before the first. deaths: workers that died while they ran this job alone.
    result_key: of a completed one, what it has in common with the requests that its images answer; empty where these
    answer none.
    decisions, provenance, error: serialized AttemptDecisions, Provenance and JobError; empty is none.
    sequence: place among all jobs, given by the store.
    """

    job_id: str
    fingerprint: str
    spec: bytes
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
    deadline_wall: float | None = None
    state: JobState.ValueType = image_pb2.JOB_STATE_QUEUED
    started_wall: float | None = None
    ended_wall: float | None = None
    ended_steady: float | None = None
    attempt: int = 0
    deaths: int = 0
    decisions: bytes = b""
    images: tuple[StoredImage, ...] = ()
    provenance: bytes = b""
    error: bytes = b""
    result_key: str = ""
    steps_done: int = 0
    sequence: int = 0

    @property
    def picture_bytes(self) -> int:
        """Bytes of its pictures and of what is kept of them."""
        return sum(image.size_bytes + image.latents_bytes for image in self.images)

    @property
    def answer_bytes(self) -> int:
        """Size of what an answer says of it, within some hundred bytes."""
        return len(self.spec) + len(self.provenance) + len(self.error)

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return self.state in LIVE

    @property
    def contents(self) -> tuple[str, ...]:
        """Digests of its pictures and of what is kept of them, each once."""
        return tuple(dict.fromkeys(digest for image in self.images for digest in image.contents))

    @property
    def kept_pictures(self) -> frozenset[str]:
        """Digests of its images of which latents are kept, for edits of them."""
        return frozenset(image.digest for image in self.images if image.latents)

    def progressed(self, progress: JobProgress) -> JobRecord | None:
        """It waits or runs, as `progress` says. None for one that has ended, and for an attempt that is not the newest.

        The first attempt's start stays.
        """
        if not self.live or progress.attempt < self.attempt:
            return None
        return replace(
            self,
            state=progress.state,
            deadline_wall=progress.deadline_wall,
            started_wall=progress.started_wall if self.started_wall is None else self.started_wall,
            attempt=progress.attempt,
            deaths=progress.deaths,
            decisions=progress.decisions,
        )

    def completed(
        self, attempt: int, *, images: tuple[StoredImage, ...], provenance: bytes, end: EndTime, result_key: str = ""
    ) -> JobRecord | None:
        """The attempt brought all images. None unless it is the one that runs."""
        if self.state != image_pb2.JOB_STATE_RUNNING or attempt != self.attempt:
            return None
        return self._completed(images, provenance, end, result_key)

    def answered(
        self, *, images: tuple[StoredImage, ...], provenance: bytes, end: EndTime, result_key: str
    ) -> JobRecord:
        """It is new, and the result of an identical job is its own."""
        assert self.live
        assert self.sequence == 0
        return self._completed(images, provenance, end, result_key)

    def failed(self, *, error: bytes, end: EndTime, steps_done: int = 0) -> JobRecord | None:
        """Return the record of the job as failed, or None if it has ended before."""
        ended = self._ended(image_pb2.JOB_STATE_FAILED, end)
        return replace(ended, error=error, steps_done=steps_done) if self.live else None

    def cancelled(self, *, error: bytes, end: EndTime, spec: bytes, steps_done: int = 0) -> JobRecord | None:
        """Return the record of the job as cancelled, or None if it has ended before. spec: what is kept of its spec."""
        ended = self._ended(image_pb2.JOB_STATE_CANCELLED, end)
        return replace(ended, error=error, spec=spec, steps_done=steps_done) if self.live else None

    def is_replaced_by(self, other: JobRecord, *, replaces: str) -> bool:
        """Whether `other`, of the same tenant and request_id, takes it over: it names this job, and that has ended."""
        return self.state in _REPLACEABLE and replaces == self.job_id != other.job_id

    def _completed(
        self, images: tuple[StoredImage, ...], provenance: bytes, end: EndTime, result_key: str
    ) -> JobRecord:
        ended = self._ended(image_pb2.JOB_STATE_COMPLETED, end)
        return replace(ended, images=images, provenance=provenance, result_key=result_key)

    def _ended(self, state: JobState.ValueType, end: EndTime) -> JobRecord:
        return replace(self, state=state, ended_wall=end.wall, ended_steady=end.steady)


Change = Callable[[JobRecord], JobRecord | None]
"""Gives the record as it is from now on, or None where nothing changes. Pure: a store may call it twice."""
