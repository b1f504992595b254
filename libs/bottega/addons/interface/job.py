"""The view of a job that the gateway gives to its add-ons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bottega.planning import Shape
from bottega.v1.generation_pb2 import GenerationSpec, Provenance
from bottega.v1.image_pb2 import PRIORITY_NORMAL, Priority
from bottega.v1.worker_pb2 import AttemptDecisions

MAX_ATTEMPTS = (1 << 12) - 1
"""Most attempts at a job in one life of the gateway, and the bits of an attempt's number that count them.

The high bits count the gateway's starts. So attempts after a restart outrank earlier ones, even if the last of those
were not written. An int32 allows 500,000 starts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """The request of a job without its spec: fields that the caller sent, and values that admission added.

    Fields that JobRecord has as well are stored with the job. The others are only needed while the request is admitted.
    """

    fingerprint: str = ""
    """Hash of the spec as the caller sent it."""
    deadline_s: float | None = None
    """Seconds after arrival until the caller's deadline; None means no deadline."""
    caller_s: float | None = None
    """Seconds until the caller's call times out, which ends the job; None for a job that goes on without its caller."""
    preview: bool = False
    """Whether the caller that created the job asked for previews."""
    received_at: float = 0.0
    """Arrival time of the request, on the monotonic clock."""
    shape: Shape = (0, 0)
    """Height and width of the latent."""
    evaluations_per_step: float = 1.0
    """Evaluations of the network in a denoising step, on average over a picture. It depends on the sampler."""
    request_id: str = ""
    """The caller's idempotency key; empty if it gave none."""
    log_id: str = ""
    """Identifier of the job in log lines."""
    image_digest: str = ""
    """Digest of the input image."""
    mask_digest: str = ""
    """Digest of the mask of an edit."""
    kept_digest: str = ""
    """Digest of the data that was kept of the input image for edits; empty if there is none, or the edit may not use
    it."""
    result_size: tuple[int, int] = (0, 0)
    """Width and height of the returned pictures in pixels; (0, 0) if they have the spec's width and height."""
    edit_source: str = ""
    """Name under which activations of an edit's source image are stored: 64 hex digits; "" if the edit reuses none."""
    computed_share: float = 1.0
    """Share of its tokens that an edit computes at a worker that has the activations of `edit_source`."""
    size_bytes: int = 0
    """Size of the request."""
    tenant: str = ""
    """The tenant that sent the request; empty if the gateway has no tenants."""
    peer: str = ""
    """Who the stored job counts for when old jobs are evicted: the tenant, else the caller's host; empty if unknown."""
    ends_with_caller: bool = False
    """Whether the job ends when its caller disconnects; a restarted gateway does not resume such a job."""
    priority: Priority.ValueType = PRIORITY_NORMAL
    """Priority among the jobs of the same tenant."""

    def deadline(self, now: float) -> float | None:
        """Return the earlier time of `deadline_s` and `caller_s`, counted from `now`; None without both."""
        return min((now + s for s in (self.deadline_s, self.caller_s) if s is not None), default=None)


@dataclass(slots=True, kw_only=True)
class JobSteps:
    """Counts of a job's denoising steps, summed over all its images."""

    done: int = 0
    total: int = 0
    repeated: int = 0
    """Steps that were computed again by a later attempt."""


@dataclass(slots=True, kw_only=True)
class JobLosses:
    """Counts of a job's failed attempts, by cause."""

    deaths: int = 0
    """Number of workers that died while this was their only job."""
    beside_others: int = 0
    """Number of workers that died while they also ran other jobs, or that became unreachable."""
    returns: int = 0
    """Number of attempts that workers refused or returned."""
    quarantined_until: int | None = None
    """Until the job has made this many steps, it runs alone, because it may have killed a worker; None if none died."""
    last_worker: str = ""
    """Name of the worker that was lost last."""
    last_at: float = 0.0
    """Time at which `last_worker` was lost, on the monotonic clock."""

    def quarantine(self, steps: JobSteps) -> None:
        """Quarantine the job after its worker died: it runs alone until it is past the step of the death.

        After a second death it runs alone to its end, because its fatal step may come later.
        """
        self.quarantined_until = steps.done if self.quarantined_until is None else steps.total


@dataclass(slots=True, kw_only=True, eq=False)
class AddOnJob:
    """The part of a gateway's job that add-ons see. `bottega.gateway.jobs.job.Job` derives from it, and changes it.

    It has many fields, because each add-on reads others.
    """

    request: JobRequest
    bare: GenerationSpec
    """The job's complete spec without input images."""
    job_id: str = ""
    number: int = 0
    """Number of the newest attempt; 0 before the first one."""
    decisions: AttemptDecisions = field(default_factory=AttemptDecisions)
    """The engine add-ons' decisions in the attempts so far, which later attempts must follow."""
    provenance: Provenance | None = None
    worker: str = ""
    """Name of the worker that runs the job; empty while the job waits."""
    steps: JobSteps = field(default_factory=JobSteps)
    losses: JobLosses = field(default_factory=JobLosses)
    versions: Mapping[str, str] = field(default_factory=dict)
    """Hash of each ControlNet that the newest attempt uses, by name."""
    servers: tuple[str, ...] = ()
    """ControlNet servers that the newest attempt uses."""

    # Read from the spec once, because the scheduler reads them for every job each time it runs.

    num_images: int = field(init=False)
    rows: int = field(init=False)
    """Batch rows that the job has in a forward pass: one for each image, two with guidance."""
    controlnets: tuple[str, ...] = field(init=False)
    """Names of the job's ControlNets, in the spec's order."""
    loras: tuple[str, ...] = field(init=False)
    """Digests of the job's LoRAs, in the spec's order."""
    lora_set: tuple[tuple[str, float], ...] = field(init=False)
    """Sorted pairs of digest and scale of the job's LoRAs: equal for jobs that need the same merged weights."""

    @property
    def attempts(self) -> int:
        """Number of attempts so far, with the running one, in all lives of the gateway."""
        return self.number & MAX_ATTEMPTS

    def use_controlnets(self, versions: Mapping[str, str], *, servers: tuple[str, ...]) -> None:
        """Record the ControlNets, with their hashes, and the servers that the newest attempt uses."""
        self.versions, self.servers = versions, servers
