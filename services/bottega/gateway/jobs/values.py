"""Values that a job consists of: its queue position, previews, checkpoints, images, times, and outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bottega.errors import BottegaError
from bottega.v1.generation_pb2 import Provenance
from bottega.v1.image_pb2 import JobState


@dataclass(slots=True, kw_only=True)
class JobTimes:
    """Times of a job on the monotonic clock, and the seconds that it spent in each stage, over all attempts."""

    created_at: float = 0.0
    due_at: float = math.inf
    """Time at which the job is due (see `bottega.gateway.scheduling.line`); inf if it has no due time."""
    queued_at: float = 0.0
    routed_at: float = 0.0
    ended_at: float | None = None
    validate_s: float = 0.0
    acknowledge_s: float = 0.0
    queue_s: float = 0.0
    route_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePosition:
    """The position of a job in the queue of its model."""

    place: int
    """Number of jobs before it."""
    estimate_s: float | None
    """Estimated seconds until the job completes; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPreview:
    """The newest preview of one image of a job."""

    jpeg: bytes
    version: int
    """A counter over all previews of the job; a larger one is newer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCheckpoint:
    """A saved state of the denoising loop from which another attempt can continue."""

    steps_done: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """A finished image, whose bytes are in the content store."""

    digest: str
    """SHA-256 of its bytes in hex, which is its key in the content store."""
    size_bytes: int
    latents: str = ""
    """SHA-256 in hex of its serialized AttemptKept, the key in the content store; "" if no latents are kept."""
    latents_bytes: int = 0

    @property
    def contents(self) -> tuple[str, ...]:
        """Keys in the content store of the image and of its kept latents, if it has any."""
        return (self.digest, self.latents) if self.latents else (self.digest,)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How a job ended: its final state, its images or its error, and the time."""

    state: JobState.ValueType
    """JOB_STATE_COMPLETED, JOB_STATE_FAILED or JOB_STATE_CANCELLED."""
    ended_wall: float
    """Time of the end, in Unix seconds."""
    images: tuple[StoredImage, ...] = ()
    provenance: Provenance | None = None
    error: BottegaError | None = None
    steps_done: int = 0
    """Number of steps that the newest attempt had completed; 0 if the job completed."""
