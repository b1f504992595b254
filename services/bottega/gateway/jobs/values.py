"""Values about a job at one moment: its place in the queue, what an attempt has brought so far, how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from bottega.errors import BottegaError
from bottega.v1.generation_pb2 import Provenance
from bottega.v1.image_pb2 import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePosition:
    """Where a queued job is: jobs of its model before it, and expected seconds until it completes."""

    place: int
    estimate_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPreview:
    """The newest preview of one image. version: counts the previews of the job."""

    jpeg: bytes
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCheckpoint:
    """A state of the denoising loop from which another attempt can resume."""

    steps_done: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """A finished image; its bytes are in the content store, under their SHA-256."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How a job ends. state: JOB_STATE_COMPLETED, _FAILED or _CANCELLED. ended_wall: Unix seconds."""

    state: JobState.ValueType
    ended_wall: float
    images: tuple[StoredImage, ...] = ()
    provenance: Provenance | None = None
    error: BottegaError | None = None
