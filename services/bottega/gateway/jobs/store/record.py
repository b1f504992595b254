"""A job as a store keeps it, and what may become of it: the rules of attempts and ends, as functions of values.

Knows no store: every store reads a record, asks it what follows, and writes that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bottega.v1 import image_pb2
from bottega.v1.image_pb2 import JobState

_LIVE = frozenset({image_pb2.JOB_STATE_QUEUED, image_pb2.JOB_STATE_RUNNING})
# A cancelled job stays what its request_id means: nobody wanted it.
_REPLACEABLE = frozenset({image_pb2.JOB_STATE_FAILED, image_pb2.JOB_STATE_COMPLETED})
_UNHAPPY = frozenset({image_pb2.JOB_STATE_FAILED, image_pb2.JOB_STATE_CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPicture:
    """A finished image; its bytes are kept elsewhere, under their SHA-256."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTime:
    """When a job ended. wall: Unix seconds, for people. steady: on the clock by which it is forgotten."""

    wall: float
    steady: float

    @classmethod
    def at(cls, wall: float, steady: float | None = None) -> EndTime:
        """steady: None where the two clocks say the same."""
        return cls(wall=wall, steady=wall if steady is None else steady)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job.

    ends_with_caller: no later life goes on with it. peer: host that it came from; empty is not known.
    spec: GenerationSpec, complete but for its input images. fingerprint: of the request as the caller sent it.
    shape: of the latent, height and width. image_digest, size_bytes: of the input image, and of the request.
    *_wall: Unix seconds. ended_steady: when it ended on the clock by which it is forgotten, which nobody sets.
    attempt: number of the newest one, 0 before the first. deaths: workers that died while they ran this job alone.
    loras_step: at which an attempt put its LoRAs in, None before one did. provenance, error: Provenance and JobError.
    sequence: place among all jobs, given by the store.

    Each method gives the record after something happened, or None where that changes nothing.
    """

    job_id: str
    fingerprint: str
    spec: bytes
    created_wall: float
    request_id: str = ""
    log_id: str = ""
    ends_with_caller: bool = False
    peer: str = ""
    shape: tuple[int, int] = (0, 0)
    image_digest: str = ""
    size_bytes: int = 0
    deadline_wall: float | None = None
    state: JobState.ValueType = image_pb2.JOB_STATE_QUEUED
    started_wall: float | None = None
    ended_wall: float | None = None
    ended_steady: float | None = None
    attempt: int = 0
    deaths: int = 0
    loras_step: int | None = None
    pictures: tuple[StoredPicture, ...] = ()
    provenance: bytes = b""
    error: bytes = b""
    sequence: int = 0

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return self.state in _LIVE

    @property
    def finished(self) -> bool:
        """Whether it completed: those are forgotten last."""
        return self.state == image_pb2.JOB_STATE_COMPLETED

    def is_current(self, attempt: int) -> bool:
        """Whether `attempt` is the one that counts."""
        return self.state == image_pb2.JOB_STATE_RUNNING and attempt == self.attempt

    def begun(self, attempt: int, *, started_wall: float) -> JobRecord | None:
        """A worker takes it. Numbers only rise, so that an older attempt never counts again.

        The newest may begin once more while it waits: it was given up, and its worker has it all the same.
        """
        least = self.attempt if self.attempt and self.state == image_pb2.JOB_STATE_QUEUED else self.attempt + 1
        if not self.live or attempt < least:
            return None
        first = started_wall if self.started_wall is None else self.started_wall
        return replace(self, state=image_pb2.JOB_STATE_RUNNING, attempt=attempt, started_wall=first)

    def requeued(self, attempt: int, *, deaths: int) -> JobRecord | None:
        """The attempt is lost: it waits again."""
        if not self.is_current(attempt):
            return None
        return replace(self, state=image_pb2.JOB_STATE_QUEUED, deaths=deaths)

    def dressed(self, attempt: int, *, loras_step: int) -> JobRecord | None:
        """The attempt puts its LoRAs in at that step; so will every later one."""
        if not self.is_current(attempt):
            return None
        return replace(self, loras_step=loras_step)

    def extended(self, deadline_wall: float | None) -> JobRecord | None:
        """It is given until another time; None is without bound."""
        return replace(self, deadline_wall=deadline_wall) if self.live else None

    def completed(
        self, attempt: int, *, pictures: tuple[StoredPicture, ...], provenance: bytes, end: EndTime
    ) -> JobRecord | None:
        """The attempt brought all images. True of one attempt of a job, once."""
        if not self.is_current(attempt):
            return None
        state = image_pb2.JOB_STATE_COMPLETED
        ended = replace(self, state=state, ended_wall=end.wall, ended_steady=end.steady)
        return replace(ended, pictures=pictures, provenance=provenance)

    def failed(
        self, attempt: int | None, *, error: bytes, state: JobState.ValueType, end: EndTime, spec: bytes | None = None
    ) -> JobRecord | None:
        """It failed or was cancelled; with an attempt, only if that one counts.

        state: JOB_STATE_FAILED or JOB_STATE_CANCELLED. spec: what is kept of it; None is all.
        """
        assert state in _UNHAPPY
        if not self.live or (attempt is not None and not self.is_current(attempt)):
            return None
        ended = replace(self, state=state, ended_wall=end.wall, ended_steady=end.steady)
        return replace(ended, error=error, spec=self.spec if spec is None else spec)

    def gives_way_to(self, other: JobRecord, *, replaces: str) -> bool:
        """Whether `other`, which comes with the same request_id, shall be drawn and is not the same again."""
        return self.state in _REPLACEABLE and replaces == self.job_id != other.job_id
