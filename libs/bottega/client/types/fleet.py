"""The services of a suite as the gateway lists them: their identity, the items that they host, and their load.

Values have those fields of the messages in fleet.proto and hosted.proto that are of use to people and programs; fields
for the gateway's scheduler alone are omitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """Used in everything that the service computes, such as a LoRA that is merged into a worker's weights."""


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
    """A measurement of how similar the residuals of a ControlNet are from step to step, with one base model."""

    model_hash: str
    """Hash of the base model, hex."""
    num_inference_steps: int
    """Steps of the measured pictures. The profile holds for requests with at least as many."""
    similarity: float
    """Mean cosine between residuals of adjacent steps, in the picture where it is lowest. From .99 on, requests that
    allow it may use the residuals of the previous step instead of waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedItem:
    """An item that a service hosts for jobs, such as a ControlNet or a LoRA."""

    kind: str
    """Kind of the services that provide such items, such as controlnet or loras."""
    name: str
    """Name of the item in requests; empty where the service knows only the digest."""
    digest: str
    """Hash of the item's content, hex."""
    base: str
    """Base model that the item was made for; empty if that is not known."""
    size_bytes: int
    """Bytes that the item takes in memory; 0 if that is not known."""
    readiness: Readiness
    popularity: int
    """Number of recent uses of the item; the service remembers a fixed number of recent uses of all items."""
    sessions: int
    """Number of sessions that use the item now."""
    scale: float = 0.0
    """Strength of a LoRA that is merged into the weights."""
    profiles: tuple[ResidualProfile, ...] = ()
    """Measurements of a ControlNet, one for each base model."""
    control_modes: int = 0
    """Number of control modes of a ControlNet; 0 if it is not a union."""
    load_s: float = 0.0
    """Seconds that the last load of a ControlNet took; 0 if that is not known."""
    pinned: bool = False
    """Whether a ControlNet is kept in memory."""
    load_error: str = ""
    """Why the last load of a ControlNet failed; empty if it did not."""
    failed_loads: int = 0
    """Number of loads of a ControlNet that failed since the service began."""
    copied: bool = False
    """Whether a ControlNet is in memory because other servers had too much to do with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutItem:
    """A file or folder that a service found in its configuration or its model's folder, but does not host."""

    kind: str
    name: str
    reason: str
    """Why the service does not host it, and what to do about that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptProgress:
    """A worker's attempt at drawing a job."""

    job_id: str
    steps_left: int
    """Remaining denoising steps, summed over all pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """The measured time of one step of a batch."""

    latent_height: int
    latent_width: int
    rows: int
    """Rows of the batch: one for each picture, two with guidance."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerationTrial:
    """The result of testing one optional acceleration on a worker's device, when the worker started."""

    name: str
    kept: bool
    """Whether the worker uses the acceleration."""
    speedup: float
    """Time without the acceleration divided by the time with it; 0 if that was not measured."""
    difference: float
    """Largest difference from the results without it, as a share of their largest value; 0 if they were not
    compared."""
    tolerance: float
    """Largest difference that is allowed."""
    reason: str
    """Why the worker does not use the acceleration; empty if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceActivity:
    """Counters of a service since its start. `steps` and `turns` restart with a worker's engine process."""

    completed: int = 0
    """Completed jobs of the gateway; completed attempts of a worker."""
    failed: int = 0
    """Jobs or attempts that failed; cancelled ones are not counted."""
    steps: int = 0
    """A worker's denoising steps, or the batch rows (an image at a step) that a ControlNet server computed."""
    turns: int = 0
    """Forward passes in which `steps` were computed."""
    lookups: int = 0
    """Requests for items that the service stores, such as LoRAs."""
    hits: int = 0
    """Lookups that found the item; for LoRAs and ControlNets, those that found it in memory."""
    routed: int = 0
    """Jobs that the gateway gave to a worker."""
    waited_s: float = 0.0
    """Seconds that the `routed` jobs waited before that, summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStart:
    """The progress of a service that is still starting."""

    stage: str
    """The current stage, such as "loading unet"."""
    done_bytes: int
    """Bytes that the stage has processed; 0 if the stage does not count bytes."""
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """The load of a service according to its newest report."""

    running: tuple[AttemptProgress, ...] = field(
        default=(), metadata={"convert": lambda attempts: tuple(map(_attempt, attempts))}
    )
    """Attempts that a worker runs."""
    step_times: tuple[StepTiming, ...] = field(default=(), metadata={"kind": StepTiming})
    fixed_s: float = 0.0
    """Seconds that a worker needs for a request in addition to its steps."""
    draining: bool = False
    """Whether the service accepts no new work, because it is about to stop."""
    max_rows: int = 0
    """Maximum number of rows in a worker's batch."""
    memory_bytes: int = 0
    """Resident memory of the service and its child processes."""
    hosted: tuple[HostedItem, ...] = field(default=(), metadata={"convert": lambda items: tuple(map(_hosted, items))})
    switch_times: Mapping[str, float] = field(
        default_factory=dict, metadata={"convert": lambda times: {time.kind: time.seconds for time in times}}
    )
    """Seconds to replace the applied items of a kind with others, such as LoRAs in the weights; empty if unknown."""
    accelerations: tuple[AccelerationTrial, ...] = field(default=(), metadata={"kind": AccelerationTrial})
    """Results of testing accelerations when a worker started."""
    activity: ServiceActivity = field(default_factory=ServiceActivity, metadata={"kind": ServiceActivity})
    start_s: float = 0.0
    """Seconds that the service's newest start took; 0 if the service does not report it."""
    left_out: tuple[LeftOutItem, ...] = field(default=(), metadata={"kind": LeftOutItem})
    queued_rows: int = 0
    """Batch rows that wait at a ControlNet server."""
    budget_bytes: int = 0
    """Upper bound on the bytes that a ControlNet server has loaded; 0 if it does not report it."""


_NO_LOAD = ServiceLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMember:
    """A service that has joined the fleet."""

    kind: str
    """Kind of service, such as worker, controlnet or loras."""
    name: str
    """Name of the service, unique in the fleet."""
    address: str
    """host:port of the service's gRPC server."""
    version: str
    """Version of Bottega that the service runs."""
    device: str
    """Device that the service computes on; empty if it computes nothing."""
    models: tuple[ServedModel, ...]
    """Models that a worker serves; empty while it starts."""
    uses: tuple[str, ...]
    """Kinds of services that this service calls."""
    joined_s: float
    """Seconds since the service joined."""
    heard_s: float
    """Seconds since the service's newest report."""
    load: ServiceLoad
    """The service's newest report; `ServiceLoad()` before the first one."""
    reported: bool
    """Whether the service has reported its load yet."""
    starting: ServiceStart | None
    """Progress of the service's start; None once it is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDemand:
    """The work for one model, and how many services of a kind it needs."""

    kind: str
    """Kind of the services: worker, encode, decode or controlnet."""
    model: str
    """Name of the model in requests."""
    desired: int
    """Number of services of the whole fleet that should run."""
    ready: int
    """Number of services that are ready."""
    starting: int
    """Number of services that scalers have started and that are not ready yet."""
    waiting: int
    """Number of jobs that wait."""
    waiting_s: float
    """Seconds of a device that the waiting jobs take."""
    arriving_s: float
    """Seconds of a device that arrive per second."""
    start_s: float
    """Seconds that such a service is expected to need for its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """A snapshot of the fleet."""

    members: tuple[FleetMember, ...] = ()
    """All services, sorted by kind and name, after the gateway itself."""
    queued: int = 0
    """Number of requests in the gateway's queue."""
    longest_wait_s: float = 0.0
    """Seconds that the request which has waited longest has been in the queue."""
    refused: tuple[FleetMember, ...] = ()
    """Workers that have ended because they cannot serve their model, with the reason in `load.left_out`."""
    demand: tuple[ServiceDemand, ...] = ()
    """The work for each model, and how many services it needs, by kind and model."""
    scheduler: str = ""
    """Name of the gateway that gives jobs to workers; empty if there is only one gateway."""
    silent: tuple[str, ...] = ()
    """Fleet addresses of gateways that did not answer."""

    def of_kind(self, kind: str) -> tuple[FleetMember, ...]:
        return tuple(member for member in self.members if member.kind == kind)


def fleet_from(answer: fleet_pb2.ListMembersResponse) -> FleetStatus:
    """Convert the gateway's response to a FleetStatus. Raise InternalError if it lists impossibly many services."""
    if len(answer.members) + len(answer.refused) > _MAX_MEMBERS:
        raise InternalError(f"the gateway lists more than {_MAX_MEMBERS:,} services")
    return FleetStatus(
        members=tuple(map(member_from, answer.members)),
        queued=answer.queued,
        longest_wait_s=answer.longest_wait_s,
        refused=tuple(map(member_from, answer.refused)),
        demand=tuple(value_from(each, ServiceDemand) for each in answer.demand),
        scheduler=answer.scheduler.name,
    )


def merge_fleets(answers: Mapping[str, fleet_pb2.ListMembersResponse | None]) -> FleetStatus:
    """Return the fleet as several gateways list it: each gateway, and what the scheduler says of all others.

    Args:
        answers: The response of each gateway, by its fleet address; None if there is none. There is at least one.
    """
    given = [answer for answer in answers.values() if answer is not None]
    newest = max(given, key=lambda answer: answer.scheduler.generation).scheduler
    # The scheduler's first: False sorts before True. A gateway lists itself first.
    fleets = sorted(
        map(fleet_from, given), key=lambda fleet: newest.name not in [one.name for one in fleet.members[:1]]
    )
    members = {(member.kind, member.name, member.address): member for fleet in fleets for member in fleet.members[:1]}
    for fleet in fleets:
        for member in fleet.members[1:]:
            members.setdefault((member.kind, member.name, member.address), member)
    return replace(
        fleets[0],
        members=tuple(members.values()),
        scheduler=newest.name,
        silent=tuple(address for address, answer in answers.items() if answer is None),
    )


def member_from(member: fleet_pb2.Member) -> FleetMember:
    """Convert a message to a FleetMember."""
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
        control_modes=item.control_modes,
        load_s=item.load_s,
        pinned=item.pinned,
        load_error=item.load_error,
        failed_loads=item.failed_loads,
        copied=item.copied,
    )
