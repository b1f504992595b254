"""What is said of a job at one moment: where it waits, what came of it so far, how it ended. Knows no job."""

from __future__ import annotations

from dataclasses import dataclass

from bottega.errors import BottegaError
from bottega.v1.generation_pb2 import Provenance
from bottega.v1.image_pb2 import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePosition:
    """Where a queued job stands: jobs of its model before it, and expected seconds until it completes."""

    place: int
    estimate_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPreview:
    """The newest look at one image. version: counts the previews of the job."""

    jpeg: bytes
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCheckpoint:
    """Where a lost attempt can be taken up again."""

    steps_done: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """A finished image; its bytes are stored under its digest."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How a job ends. state: JOB_STATE_COMPLETED, _FAILED or _CANCELLED. ended_wall: Unix seconds."""

    state: JobState.ValueType
    ended_wall: float
    pictures: tuple[StoredImage, ...] = ()
    provenance: Provenance | None = None
    error: BottegaError | None = None
