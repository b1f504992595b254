"""Parts of a job: the request that it was made of, its place in the queue, what its attempts have brought and lost, its
times, and how it ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bottega.errors import BottegaError
from bottega.planning import Shape
from bottega.v1.generation_pb2 import Provenance
from bottega.v1.image_pb2 import PRIORITY_NORMAL, JobState, Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What the gateway keeps of the request that a job was made of, beside its spec.

    request_id: empty where the caller gave none. log_id: given for its log lines. fingerprint: of the spec as the
    caller sent it. image_digest, mask_digest: of the input image, and of the mask of an edit. kept_latents: digest of
    what was kept of that image when it was drawn, for an edit that may use it. result_size: width and height of its
    pictures in pixels, where they are not the spec's; else (0, 0). template: names what an edit draws from, of which
    activations may be recorded, 64 hex digits; empty where masked blocks are not for it. computed_share: of its tokens,
    what it computes where they are. size_bytes: of the request. shape: of the latent,
    height and width. tenant: whose it is; empty where no keys are configured. peer: who it counts for when jobs are
    forgotten: its tenant, else the host that it came from; empty is not known. ends_with_caller: nobody else
    can ask for the job, and a restarted gateway does not resume it. priority: how urgent it is beside others of its
    tenant.
    """

    fingerprint: str
    shape: Shape = (0, 0)
    request_id: str = ""
    log_id: str = ""
    image_digest: str = ""
    mask_digest: str = ""
    kept_latents: str = ""
    result_size: tuple[int, int] = (0, 0)
    template: str = ""
    computed_share: float = 1.0
    size_bytes: int = 0
    tenant: str = ""
    peer: str = ""
    ends_with_caller: bool = False
    priority: Priority.ValueType = PRIORITY_NORMAL


@dataclass(slots=True, kw_only=True)
class JobSteps:
    """Denoising steps over all images. repeated: those that a later attempt made again."""

    done: int = 0
    total: int = 0
    repeated: int = 0


@dataclass(slots=True, kw_only=True)
class JobLosses:
    """What its attempts ended with that brought no image.

    deaths: workers that died while they ran it exclusively. beside_others: those that died beside others, or were cut
    off. returns: attempts that workers refused or returned. quarantined_until: number of steps within which it may have
    killed a worker. last_worker: that was lost, at last_at on the monotonic clock.
    """

    deaths: int = 0
    beside_others: int = 0
    returns: int = 0
    quarantined_until: int | None = None
    last_worker: str = ""
    last_at: float = 0.0

    def quarantine(self, steps: JobSteps) -> None:
        """A worker died with it, so far: it runs exclusively until it has got further.

        After a second death it stays quarantined: what kills may come late, and others must not be near it then.
        """
        self.quarantined_until = steps.done if self.quarantined_until is None else steps.total


@dataclass(slots=True, kw_only=True)
class JobTimes:
    """Moments on the monotonic clock, and seconds that it spent in each stage so far, over all its attempts.

    due_at: when it is due, see `bottega.gateway.scheduling.line`; endless where that is not known, or first come is
    first served.
    """

    created_at: float = 0.0
    due_at: float = math.inf
    queued_at: float = 0.0
    routed_at: float = 0.0
    ended_at: float | None = None
    validate_s: float = 0.0
    acknowledge_s: float = 0.0
    queue_s: float = 0.0
    route_s: float = 0.0


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
    """A finished image; its bytes are in the content store, under their SHA-256.

    latents: SHA-256 of what keep_for_editing keeps of it, which is there too; empty where nothing is kept.
    latents_bytes: size of that.
    """

    digest: str
    size_bytes: int
    latents: str = ""
    latents_bytes: int = 0

    @property
    def contents(self) -> tuple[str, ...]:
        """Digests of all that the content store has of it."""
        return (self.digest, self.latents) if self.latents else (self.digest,)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How a job ends.

    state: JOB_STATE_COMPLETED, _FAILED or _CANCELLED. ended_wall: Unix seconds. steps_done: denoising steps that its
    newest attempt had made, of a job that did not complete.
    """

    state: JobState.ValueType
    ended_wall: float
    images: tuple[StoredImage, ...] = ()
    provenance: Provenance | None = None
    error: BottegaError | None = None
    steps_done: int = 0
