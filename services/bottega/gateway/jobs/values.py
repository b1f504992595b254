"""Parts of a job: its queue position, its previews, checkpoints and images, its times, and its outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bottega.errors import BottegaError
from bottega.v1.generation_pb2 import Provenance
from bottega.v1.image_pb2 import JobState


@dataclass(slots=True, kw_only=True)
class JobTimes:
    """Moments on the monotonic clock, and the seconds that a job spent in each stage so far, over all its attempts."""

    created_at: float = 0.0
    due_at: float = math.inf
    """When it is due, see `bottega.gateway.scheduling.line`; infinite if unknown or if jobs are served as they come."""
    queued_at: float = 0.0
    routed_at: float = 0.0
    ended_at: float | None = None
    validate_s: float = 0.0
    acknowledge_s: float = 0.0
    queue_s: float = 0.0
    route_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePosition:
    """The place of a job in the queue."""

    place: int
    """Number of jobs of its model before it."""
    estimate_s: float | None
    """Expected seconds until it completes; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPreview:
    """The newest preview of one image."""

    jpeg: bytes
    version: int
    """Number of previews of the job so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCheckpoint:
    """A state of the denoising loop from which another attempt can go on."""

    steps_done: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """A finished image, whose bytes are in the content store."""

    digest: str
    """SHA-256 of its bytes, which is their key in the content store."""
    size_bytes: int
    latents: str = ""
    """SHA-256 of its kept data (AttemptKept), the key in the content store; empty if none is kept."""
    latents_bytes: int = 0

    @property
    def contents(self) -> tuple[str, ...]:
        """Keys in the content store of the image and of its kept latents, if any."""
        return (self.digest, self.latents) if self.latents else (self.digest,)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """The outcome of a job: its final state, its images or its error, and when it ended."""

    state: JobState.ValueType
    """JOB_STATE_COMPLETED, JOB_STATE_FAILED or JOB_STATE_CANCELLED."""
    ended_wall: float
    """When it ended, in Unix seconds."""
    images: tuple[StoredImage, ...] = ()
    provenance: Provenance | None = None
    error: BottegaError | None = None
    steps_done: int = 0
    """Number of denoising steps of the newest attempt of a job that did not complete."""
