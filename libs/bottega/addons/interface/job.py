"""What add-ons of the gateway see of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from bottega.planning import Shape
from bottega.v1.generation_pb2 import GenerationSpec, Provenance
from bottega.v1.image_pb2 import PRIORITY_NORMAL, Priority
from bottega.v1.worker_pb2 import AttemptDecisions


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """The request of a job, without its spec: the fields that the caller sent, and the facts that admission added.

    The fields that JobRecord has as well are stored. The others only matter while the request is admitted.
    """

    fingerprint: str = ""
    """Hash of the spec as the caller sent it."""
    deadline_s: float | None = None
    """Seconds after which no caller wants the pictures; None means no deadline."""
    caller_s: float | None = None
    """Seconds until the caller leaves, and the job ends with it; None for a job that goes on without its caller."""
    preview: bool = False
    """Whether its first caller wants previews."""
    received_at: float = 0.0
    """Time of its arrival, on the monotonic clock."""
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
    kept_digest: str = ""
    """Digest of what is kept of the input image; empty if nothing is, or the edit may not use it."""
    result_size: tuple[int, int] = (0, 0)
    """Width and height of its pictures in pixels if they are not the spec's; else (0, 0)."""
    edit_source: str = ""
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

    def deadline(self, now: float) -> float | None:
        """Return the time after which no caller wants the pictures, given the clock's current time `now`."""
        return min((now + s for s in (self.deadline_s, self.caller_s) if s is not None), default=None)


@dataclass(slots=True, kw_only=True)
class JobSteps:
    """Denoising steps over all images."""

    done: int = 0
    total: int = 0
    repeated: int = 0
    """Number of steps that later attempts repeated."""


@dataclass(slots=True, kw_only=True)
class JobLosses:
    """Counts of a job's failed attempts, by cause."""

    deaths: int = 0
    """Number of workers that died while they ran it exclusively."""
    beside_others: int = 0
    """Number of workers that died while they also ran other jobs, or that became unreachable."""
    returns: int = 0
    """Number of attempts that workers refused or returned."""
    quarantined_until: int | None = None
    """Number of steps within which it may have killed a worker; None if none died."""
    last_worker: str = ""
    """The worker that was lost last."""
    last_at: float = 0.0
    """Time of that loss, on the monotonic clock."""

    def quarantine(self, steps: JobSteps) -> None:
        """Quarantine the job after a worker died while running it, until an attempt has made more steps.

        After a second death it stays quarantined: its fatal step may come late, and other jobs must not be near then.
        """
        self.quarantined_until = steps.done if self.quarantined_until is None else steps.total


class AddOnJob(Protocol):
    """A job of the gateway, as add-ons see it. `bottega.gateway.jobs.job.Job` says how its states change."""

    job_id: str
    request: JobRequest
    bare: GenerationSpec
    """Its complete spec without input images."""
    num_images: int
    rows: int
    """Number of rows that it puts into each turn."""
    steps: JobSteps
    losses: JobLosses
    decisions: AttemptDecisions
    """The decisions of the attempts so far, which later attempts must follow."""
    provenance: Provenance | None
    worker: str
    """Name of the worker that has it; empty while it waits."""
    controlnets: tuple[str, ...]
    """Names of its ControlNets, one for each in the spec."""
    versions: Mapping[str, str]
    """Hashes of the ControlNets that the newest attempt uses, by name."""
    servers: tuple[str, ...]
    """Servers that were assigned to the newest attempt for its ControlNets."""
    loras: tuple[str, ...]
    """Digests of its LoRAs, one for each in the spec."""
    lora_set: tuple[tuple[str, float], ...]
    """Sorted pairs of digest and scale of its LoRAs: the same for jobs whose steps need the same weights."""

    @property
    def attempts(self) -> int:
        """Number of attempts so far."""

    def use_controlnets(self, versions: Mapping[str, str], *, servers: tuple[str, ...]) -> None:
        """Note the hashes of the ControlNets that the newest attempt uses, and the servers that it was given."""
