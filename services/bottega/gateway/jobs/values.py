"""Parts of a job: its request, its place in the queue, what its attempts have brought and lost, its times, its end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bottega.errors import BottegaError
from bottega.planning import Shape
from bottega.v1.generation_pb2 import Provenance
from bottega.v1.image_pb2 import PRIORITY_NORMAL, JobState, Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """The request that a job was made of, without its spec."""

    fingerprint: str
    """Hash of the spec as the caller sent it."""
    shape: Shape = (0, 0)
    """Height and width of the latent."""
    request_id: str = ""
    """The caller's idempotency key; empty if it gave none."""
    log_id: str = ""
    """Identifier of the job in log lines."""
    image_digest: str = ""
    """Digest of the input image."""
    mask_digest: str = ""
    """Digest of the mask of an edit."""
    kept_latents: str = ""
    """Digest of the input image's kept latents; empty if there are none, or the edit may not use them."""
    result_size: tuple[int, int] = (0, 0)
    """Width and height of its pictures in pixels if they are not the spec's; else (0, 0)."""
    template: str = ""
    """Name of an edit's source image, whose activations may be recorded: 64 hex digits; "" without masked blocks."""
    computed_share: float = 1.0
    """Share of its tokens that an edit computes at a worker that has these activations."""
    size_bytes: int = 0
    """Size of the request."""
    tenant: str = ""
    """The tenant that it belongs to; empty if no keys are configured."""
    peer: str = ""
    """Owner whose share the job counts for when jobs are forgotten: the tenant, else the host; empty if unknown."""
    ends_with_caller: bool = False
    """Whether only its caller can ask for the job, so that a restarted gateway does not resume it."""
    priority: Priority.ValueType = PRIORITY_NORMAL
    """Priority among the jobs of the same tenant."""


@dataclass(slots=True, kw_only=True)
class JobSteps:
    """Denoising steps over all images."""

    done: int = 0
    total: int = 0
    repeated: int = 0
    """Number of steps that a later attempt made again."""


@dataclass(slots=True, kw_only=True)
class JobLosses:
    """The attempts of a job that brought no image."""

    deaths: int = 0
    """Number of workers that died while they ran it exclusively."""
    beside_others: int = 0
    """Number of workers that died with it beside others, or were cut off."""
    returns: int = 0
    """Number of attempts that workers refused or returned."""
    quarantined_until: int | None = None
    """Number of steps within which it may have killed a worker; None if none died."""
    last_worker: str = ""
    """The worker that was lost last."""
    last_at: float = 0.0
    """When that was, on the monotonic clock."""

    def quarantine(self, steps: JobSteps) -> None:
        """Quarantine a job, after a worker died with it, until it has got further.

        After a second death it stays quarantined: its fatal step may come late, and other jobs must not be near then.
        """
        self.quarantined_until = steps.done if self.quarantined_until is None else steps.total


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
    """SHA-256 of its bytes, by which the content store has them."""
    size_bytes: int
    latents: str = ""
    """SHA-256 of what keep_for_editing keeps of it, which is in the content store, too; empty if nothing is kept."""
    latents_bytes: int = 0

    @property
    def contents(self) -> tuple[str, ...]:
        """Digests of everything that the content store has of it."""
        return (self.digest, self.latents) if self.latents else (self.digest,)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """The end of a job."""

    state: JobState.ValueType
    """JOB_STATE_COMPLETED, JOB_STATE_FAILED or JOB_STATE_CANCELLED."""
    ended_wall: float
    """When it ended, in Unix seconds."""
    images: tuple[StoredImage, ...] = ()
    provenance: Provenance | None = None
    error: BottegaError | None = None
    steps_done: int = 0
    """Number of denoising steps of the newest attempt of a job that did not complete."""
