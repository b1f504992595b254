"""The views that the gateway gives to its add-ons: jobs, members of the fleet, and the access of a caller.

A caller may name the shared models, LoRAs and ControlNets that its tenant was granted, and the tenant's own. Stores and
servers list an own item as NAME@TENANT; the tenant calls it NAME. An item that a caller may not name is refused as if
it did not exist, with the same work, so that response times do not reveal it.
"""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bottega import kinds, rules
from bottega.planning import RowFractions, Shape, StepTable, StepTimes
from bottega.rpc.channel import Target
from bottega.rpc.security.caller import ALL_GRANTED, Caller, Grants
from bottega.v1 import fleet_pb2, image_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Provenance
from bottega.v1.hosted_pb2 import HOSTED_STATE_APPLIED, Hosted
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
    keeps_steps: bool = False
    """Whether its strength skips no step."""
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
    webhook: bytes = b""
    """Serialized Webhook of the request; empty if it has none."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedKind:
    """The items of one kind that a service hosts."""

    items: tuple[Hosted, ...] = ()
    digests: frozenset[str] = frozenset()
    """Digests of the hosted items."""
    applied: tuple[tuple[str, float], ...] = ()
    """Sorted pairs of digest and scale of the items that are merged into the weights now, such as LoRAs."""
    switch_s: float = 0.0
    """Seconds it takes to replace the applied items with others."""


_NOTHING_HOSTED = HostedKind()


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A service that has joined the gateway, with its last report."""

    registration: fleet_pb2.Registration
    joined_at: float
    heard_at: float
    lease_until: float = math.inf
    """Time at which the member counts as lost, unless it reports before."""
    instance: str = ""
    """Random secret of the member's process, which proves its identity and is never shown."""
    host: str = ""
    """Host from which the member opened its newest Join stream."""
    load: fleet_pb2.Load = field(default_factory=fleet_pb2.Load)
    has_reported: bool = False
    """Whether the member has reported its load; until then `load` has default values."""
    steps_left: dict[str, int] = field(default_factory=dict)
    """Remaining steps of each attempt that the member runs, by job."""
    shares: dict[str, float] = field(default_factory=dict)
    """Share of the tokens that each running attempt computes, by job; unknown shares are missing."""
    times: StepTimes = field(default_factory=StepTimes)
    fractions: RowFractions = field(default_factory=RowFractions)
    planned: StepTable = field(default_factory=StepTable)
    """Planned seconds of forward passes that compute only masked tokens, including the loads of stored activations."""
    hosted: Mapping[str, HostedKind] = field(default_factory=dict)
    """Hosted items, by kind."""
    connected: bool = True
    stream: int = 1
    """Number of Join streams that the member has opened. Reports over older streams are ignored."""
    backlog: int = 0
    """Number of jobs that wait for this member, as last sent to the member."""
    backed_off_until: float = 0.0
    """Time until which the member gets no new jobs or ControlNet sessions, on the monotonic clock."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the newest stream has something to send or has to end. Every new stream gets a new event."""
    # The scheduler reads these of every member in every round, where reading a message would be too slow.
    name: str = field(init=False)
    """Name of the member, unique among members of its kind."""
    kind: str = field(init=False)
    is_worker: bool = field(init=False)
    """Whether the member is a worker."""
    served: frozenset[str] = field(init=False)
    """Names of `models`."""
    asks: tuple[str, ...] = field(init=False)
    """Stages of a worker's pictures that workers with only this role compute for it, of `kinds.STAGES`."""
    draining: bool = False
    """Whether the member has reported that it accepts no new work."""
    revision: int = 0
    """A counter that rises when the attempts that the gateway has sent to the worker, or their steps, change."""

    def __post_init__(self) -> None:
        self.name, self.kind = self.registration.name, self.registration.kind
        self.is_worker = self.kind == kinds.WORKER
        self.served = frozenset(model.name for model in self.models)
        self.asks = tuple(stage for stage in kinds.STAGES if stage in self.registration.uses)

    @property
    def target(self) -> Target:
        """The member's address, and the identity that its certificate must have."""
        return Target(address=self.registration.address, role=self.kind, name=self.name)

    @property
    def models(self) -> Sequence[image_pb2.Model]:
        """Models that the worker serves; empty for other kinds of services."""
        return self.registration.models if self.is_worker else ()

    @property
    def is_starting(self) -> bool:
        """Whether the member is a worker, of any roles, whose engine is not ready, so that it serves no model yet."""
        return (self.is_worker or self.kind in kinds.STAGES) and not self.registration.models

    def computes_stage_for(self, worker: Member) -> bool:
        """Return whether the member, a worker with one role, serves a model of `worker` with equal weights and type."""
        own = {(model.model_hash, model.dtype) for model in self.registration.models}
        return any((model.model_hash, model.dtype) in own for model in worker.registration.models)

    def hosts(self, kind: str) -> HostedKind:
        """Return the items of a kind that the member hosts."""
        return self.hosted.get(kind, _NOTHING_HOSTED)

    def serves(self, model: str) -> bool:
        """Return whether the member is a worker that serves the model."""
        return model in self.served

    def is_instance(self, instance: str) -> bool:
        """Return whether the member is the process with this secret."""
        return hmac.compare_digest(self.instance.encode(), instance.encode())

    def note_load(self, load: fleet_pb2.Load) -> None:
        """Store a report of the member, and what the scheduler reads of it."""
        self.load, self.has_reported, self.draining = load, True, load.draining
        self.steps_left = {running.attempt.job_id: running.steps_left for running in load.running}
        self.shares = {
            running.attempt.job_id: running.computed_share
            for running in load.running
            if 0 < running.computed_share <= 1  # NaN is not
        }
        self.fractions = RowFractions.from_entries(
            ((time.latent_height, time.latent_width), time.fixed_share)
            for time in load.masked_times
            if time.HasField("fixed_share")
        )
        self.planned = StepTable.from_entries(
            ((time.latent_height, time.latent_width), step.rows, step.seconds)
            for time in load.masked_times
            for step in time.planned
        )
        self.times = StepTimes.from_entries(
            (
                ((time.latent_height, time.latent_width), time.rows, time.seconds)
                for time in load.step_times
                if math.isfinite(time.seconds) and time.seconds > 0
            ),
            outdated={
                ((time.latent_height, time.latent_width), time.rows) for time in load.step_times if time.outdated
            },
        )
        self.hosted = hosted_by_kind(load)

    def report_backlog(self, backlog: int) -> None:
        """Send the number of waiting jobs to the member over its stream, if it has changed."""
        if backlog != self.backlog:
            self.backlog = backlog
            self.wake.set()


def hosted_by_kind(load: fleet_pb2.Load) -> Mapping[str, HostedKind]:
    """Return the items that a service hosts according to its report, by kind."""
    switch_s = {time.kind: time.seconds for time in load.switch_times}
    items: dict[str, list[Hosted]] = {kind: [] for kind in switch_s}
    for item in load.hosted:
        items.setdefault(item.kind, []).append(item)
    return {kind: _hosted(reported, switch_s.get(kind, 0.0)) for kind, reported in items.items()}


def _hosted(reported: Iterable[Hosted], switch_s: float) -> HostedKind:
    items: list[Hosted] = []
    applied: list[Hosted] = []
    for item in reported:
        (applied if item.state == HOSTED_STATE_APPLIED else items).append(item)
    return HostedKind(
        items=tuple(items),
        digests=frozenset(item.digest for item in items),
        applied=tuple(sorted((item.digest, item.scale) for item in applied)),
        switch_s=switch_s,
    )


_OF = "@"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The names of models, LoRAs and ControlNets that one caller may use."""

    tenant: str = ""
    """The caller's tenant; empty for operators and for callers of a gateway without keys, who may name everything."""
    grants: Grants = ALL_GRANTED
    """The shared models, LoRAs and ControlNets that the tenant may name."""

    @classmethod
    def of(cls, caller: Caller) -> Access:
        return cls(tenant=caller.tenant, grants=caller.grants)

    def has_model(self, name: str) -> bool:
        """Return whether the caller may name the model."""
        return not self.tenant or _granted(name, self.grants.models)

    def has_lora(self, full_name: str) -> bool:
        """Return whether the caller may name a LoRA of this full name. It need not exist."""
        return self._has(full_name, self.grants.loras)

    def has_controlnet(self, full_name: str) -> bool:
        """Return whether the caller may name a ControlNet of this full name. It need not exist."""
        return self._has(full_name, self.grants.controlnets)

    def own(self, name: str) -> str:
        """Return the full name of the tenant's own item of that name; empty if it can have none."""
        full_name = f"{name}{_OF}{self.tenant}"
        return full_name if self.tenant and rules.is_adapter_name(full_name) else ""

    def short_name(self, full_name: str) -> str:
        """Return the name by which the caller names an item: without @TENANT if the item is the tenant's own."""
        return full_name.removesuffix(f"{_OF}{self.tenant}") if self.tenant else full_name

    def _has(self, full_name: str, granted: Collection[str]) -> bool:
        name, of, owner = full_name.partition(_OF)
        return not self.tenant or (owner == self.tenant if of else _granted(name, granted))


ANYTHING = Access()
"""The access of a caller that may name everything."""


def _granted(name: str, granted: Collection[str]) -> bool:
    return not granted or name in granted
