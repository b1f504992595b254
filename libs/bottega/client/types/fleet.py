"""The services of a suite as the gateway lists them: their identity, the items that they host, and their load.

Values have the fields of the contract's messages (fleet.proto, hosted.proto) that are of use to people and programs;
what only the gateway's scheduler needs is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from bottega.client.types.messages import value_from
from bottega.client.types.models import ServedModel, model_from
from bottega.errors import InternalError
from bottega.v1 import fleet_pb2, hosted_pb2

# Far above what a gateway takes. A hostile one could list millions of empty members.
_MAX_MEMBERS = 4096


class Readiness(StrEnum):
    """The state of an item that a service hosts, such as on disk, loading, or in memory."""

    UNKNOWN = ""
    ON_DISK = "on disk"
    LOADING = "loading"
    LOADED = "loaded"
    APPLIED = "applied"
    """Part of everything that the service computes, such as a LoRA that is merged into a worker's weights."""


_READINESS = {
    hosted_pb2.HOSTED_STATE_ON_DISK: Readiness.ON_DISK,
    hosted_pb2.HOSTED_STATE_LOADING: Readiness.LOADING,
    hosted_pb2.HOSTED_STATE_LOADED: Readiness.LOADED,
    hosted_pb2.HOSTED_STATE_APPLIED: Readiness.APPLIED,
}


def _readiness(state: hosted_pb2.HostedState.ValueType) -> Readiness:
    return _READINESS.get(state, Readiness.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualProfile:
    """A measurement of how similar a ControlNet's residuals are from step to step, with one base model."""

    model_hash: str
    """Hash of the base model, hex."""
    num_inference_steps: int
    """Steps of the measured pictures. The profile holds for requests of at least so many steps."""
    similarity: float
    """Mean cosine between adjacent steps, in the worst picture. From .99 on, requests that allow it may go on with the
    residuals of the step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedItem:
    """An item that a service hosts for jobs, such as a ControlNet or a LoRA."""

    kind: str
    """Kind of the services that it comes from, such as controlnet or loras."""
    name: str
    """Name to ask for; empty where the service knows only the digest."""
    digest: str
    """Hash of its content, hex."""
    base: str
    """Base model that it was made for; empty if that is not known."""
    size_bytes: int
    """Bytes in memory; 0 if that is not known."""
    readiness: Readiness
    popularity: int
    """Number of its uses among the newest uses of all items that the service remembers."""
    sessions: int
    """Sessions that use it now."""
    scale: float = 0.0
    """Strength of a LoRA that is applied."""
    profiles: tuple[ResidualProfile, ...] = ()
    """Measurements of a ControlNet, one for each base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutItem:
    """A file or folder that a service found in its configuration or its model's folder, and does not host."""

    kind: str
    name: str
    reason: str
    """Why it is not hosted, and what to do about that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptProgress:
    """An attempt at a job that a worker holds."""

    job_id: str
    steps_left: int
    """Remaining denoising steps, over all pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """The measured time of one step of a batch."""

    latent_height: int
    latent_width: int
    rows: int
    """Rows of the batch; a guided request has two."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerationTrial:
    """The result of trying one optional acceleration on a worker's device, when the worker started."""

    name: str
    kept: bool
    """Whether the worker uses it."""
    speedup: float
    """Time without the acceleration divided by time with it; 0 if it was not timed."""
    difference: float
    """Largest difference from the plain results, as a share of their largest value; 0 if they were not compared."""
    tolerance: float
    """Largest difference that is allowed."""
    reason: str
    """Why the worker does not use it; empty if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceActivity:
    """Counts of a service since its start. Steps and turns start again with a new engine process."""

    completed: int = 0
    """Completed jobs of the gateway, completed attempts of a worker."""
    failed: int = 0
    """Jobs or attempts that failed; cancelled ones are not counted."""
    steps: int = 0
    """Denoising steps of a worker, rows that a ControlNet server computed."""
    turns: int = 0
    """Forward passes in which these steps were made."""
    lookups: int = 0
    """Requests for what it stores, such as LoRAs."""
    hits: int = 0
    """Lookups that found the item; for LoRAs and ControlNets, in memory."""
    routed: int = 0
    """Jobs of the gateway that were given to a worker."""
    waited_s: float = 0.0
    """Seconds that these jobs waited together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStart:
    """The progress of a service that is still starting."""

    stage: str
    """The current stage, such as "loading unet"."""
    done_bytes: int
    """Bytes of the stage that were processed; 0 if the stage does not count bytes."""
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """The load of a service, by its newest report."""

    running: tuple[AttemptProgress, ...] = field(
        default=(), metadata={"convert": lambda attempts: tuple(map(_attempt, attempts))}
    )
    """Attempts that a worker holds."""
    step_times: tuple[StepTiming, ...] = field(default=(), metadata={"kind": StepTiming})
    fixed_s: float = 0.0
    """Seconds that a request takes in a worker in addition to its steps."""
    draining: bool = False
    """Whether it takes no new work, because it is about to stop."""
    max_rows: int = 0
    """Rows that a batch of a worker may have."""
    memory_bytes: int = 0
    """Resident memory of the service and its child processes."""
    hosted: tuple[HostedItem, ...] = field(default=(), metadata={"convert": lambda items: tuple(map(_hosted, items))})
    switch_times: Mapping[str, float] = field(
        default_factory=dict, metadata={"convert": lambda times: {time.kind: time.seconds for time in times}}
    )
    """Seconds that it takes to apply other items of a kind, such as other LoRAs in the weights; empty if unknown."""
    accelerations: tuple[AccelerationTrial, ...] = field(default=(), metadata={"kind": AccelerationTrial})
    """Findings of the self-check at a worker's start."""
    activity: ServiceActivity = field(default_factory=ServiceActivity, metadata={"kind": ServiceActivity})
    start_s: float = 0.0
    """Seconds that the newest start took; 0 if the service does not report it."""
    left_out: tuple[LeftOutItem, ...] = field(default=(), metadata={"kind": LeftOutItem})


_NO_LOAD = ServiceLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMember:
    """A service that has joined the fleet."""

    kind: str
    """Kind of service, such as worker, controlnet or loras."""
    name: str
    """Its name, which no other service of the fleet has."""
    address: str
    """host:port of its gRPC server."""
    version: str
    """Version of the suite that it runs."""
    device: str
    """Device that it computes on; empty if it computes nothing."""
    models: tuple[ServedModel, ...]
    """Models that a worker serves; none while it starts."""
    uses: tuple[str, ...]
    """Kinds of services that it uses."""
    joined_s: float
    """Seconds since it joined."""
    heard_s: float
    """Seconds since its newest report."""
    load: ServiceLoad
    """Its newest report; `ServiceLoad()` before the first one."""
    reported: bool
    """Whether it has reported its load yet."""
    starting: ServiceStart | None
    """None once it is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """A snapshot of the fleet."""

    members: tuple[FleetMember, ...] = ()
    """Services by kind and name; the gateway itself is the first."""
    queued: int = 0
    """Requests that wait in the gateway's queue."""
    longest_wait_s: float = 0.0
    """Seconds that the longest waiting request has waited."""
    refused: tuple[FleetMember, ...] = ()
    """Workers that ended because they cannot serve their model, with the reason in `load.left_out`."""

    def of_kind(self, kind: str) -> tuple[FleetMember, ...]:
        """Return the services of one kind."""
        return tuple(member for member in self.members if member.kind == kind)


def fleet_from(answer: fleet_pb2.ListMembersResponse) -> FleetStatus:
    """Return the fleet that the wire describes. Raise InternalError if it has more services than any fleet has."""
    if len(answer.members) + len(answer.refused) > _MAX_MEMBERS:
        raise InternalError(f"the gateway lists more than {_MAX_MEMBERS:,} services")
    return FleetStatus(
        members=tuple(map(member_from, answer.members)),
        queued=answer.queued,
        longest_wait_s=answer.longest_wait_s,
        refused=tuple(map(member_from, answer.refused)),
    )


def member_from(member: fleet_pb2.Member) -> FleetMember:
    """Return the service that the wire describes."""
    registration = member.registration
    starts = member.load.HasField("starting")
    return FleetMember(
        kind=registration.kind,
        name=registration.name,
        address=registration.address,
        version=registration.version,
        device=registration.device,
        models=tuple(map(model_from, registration.models)),
        uses=tuple(registration.uses),
        joined_s=member.joined_s,
        heard_s=member.heard_s,
        load=value_from(member.load, ServiceLoad) if member.HasField("load") else _NO_LOAD,
        reported=member.HasField("load"),
        starting=value_from(member.load.starting, ServiceStart) if starts else None,
    )


def _attempt(attempt: fleet_pb2.RunningAttempt) -> AttemptProgress:
    return AttemptProgress(job_id=attempt.attempt.job_id, steps_left=attempt.steps_left)


def _hosted(item: hosted_pb2.Hosted) -> HostedItem:
    return HostedItem(
        kind=item.kind,
        name=item.name,
        digest=item.digest,
        base=item.base,
        size_bytes=item.size_bytes,
        readiness=_readiness(item.state),
        popularity=item.popularity,
        sessions=item.sessions,
        scale=item.scale,
        profiles=tuple(value_from(profile, ResidualProfile) for profile in item.profiles),
    )
