"""Members of the fleet, each with its last report, the models that were seen, and the interface of observers."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bottega import kinds
from bottega.clocks import Clock
from bottega.gateway.fleet.validation import MAX_MODELS
from bottega.planning import RowFractions, StepTable, StepTimes
from bottega.rpc.channel import Target
from bottega.v1 import fleet_pb2, image_pb2
from bottega.v1.hosted_pb2 import HOSTED_STATE_APPLIED, Hosted

MAX_START_GRACE_S = 600.0
"""Upper bound on the grace of services that are slow to start; a larger model_grace_s holds for all."""

# Multiple of the longest start. The next one may be from a cold disk, the service itself starts before its engine, and
# it waits for the lease of its name.
_STARTS = 2.0
# Starts of a model's workers that are remembered, the newest ones.
_MAX_STARTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedKind:
    """The items of one kind that a service hosts."""

    items: tuple[Hosted, ...] = ()
    digests: frozenset[str] = frozenset()
    """Digests of the items."""
    applied: tuple[tuple[str, float], ...] = ()
    """Digest and scale of each item that is in use for all that the service computes, sorted."""
    switch_s: float = 0.0
    """Seconds that it takes to apply other items."""


_NOTHING_HOSTED = HostedKind()


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A service that has joined, with its last report."""

    registration: fleet_pb2.Registration
    joined_at: float
    heard_at: float
    instance: str = ""
    """A secret of its process, which the gateway never shows."""
    host: str = ""
    """Host of its newest stream."""
    load: fleet_pb2.Load = field(default_factory=fleet_pb2.Load)
    has_reported: bool = False
    """Whether `load` is a report of its own."""
    steps_left: dict[str, int] = field(default_factory=dict)
    """Steps that are left of the attempts that it runs, by job."""
    shares: dict[str, float] = field(default_factory=dict)
    """Shares of the tokens that these attempts compute, by job, as far as known."""
    times: StepTimes = field(default_factory=StepTimes)
    fractions: RowFractions = field(default_factory=RowFractions)
    planned: StepTable = field(default_factory=StepTable)
    """Seconds of turns that load what masked rows do not compute."""
    hosted: Mapping[str, HostedKind] = field(default_factory=dict)
    """What it hosts, by kind."""
    connected: bool = True
    stream: int = 1
    """Number of its Join streams; only the newest one speaks for it."""
    backlog: int = 0
    """Number of jobs that wait for it, as its stream was told."""
    backed_off_until: float = 0.0
    """Until when it gets no new jobs or ControlNet sessions, on the monotonic clock."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its newest stream has something to send or has to end; every stream has an event of its own."""
    # The scheduler reads these of every member in every round, where reading a message would be too slow.
    name: str = field(init=False)
    """Its name, which is unique among members of its kind."""
    kind: str = field(init=False)
    is_worker: bool = field(init=False)
    """Whether it draws pictures."""
    _served: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.kind = self.registration.name, self.registration.kind
        self.is_worker = self.kind == kinds.WORKER
        self._served = frozenset(model.name for model in self.models)

    @property
    def target(self) -> Target:
        """Its address, and the identity that it must have."""
        return Target(address=self.registration.address, role=self.kind, name=self.name)

    @property
    def models(self) -> Sequence[image_pb2.Model]:
        """Models that it draws with; other kinds of services have none."""
        return self.registration.models if self.is_worker else ()

    @property
    def served(self) -> frozenset[str]:
        """Names of its models."""
        return self._served

    @property
    def is_starting(self) -> bool:
        """Whether it is a worker whose engine is not ready, so that it serves no model."""
        return self.is_worker and not self._served

    def hosts(self, kind: str) -> HostedKind:
        """Return the items of a kind that the member hosts."""
        return self.hosted.get(kind, _NOTHING_HOSTED)

    def serves(self, model: str) -> bool:
        """Return whether it is a worker of that model."""
        return model in self._served

    def is_instance(self, instance: str) -> bool:
        """Return whether it is the process with that secret."""
        return hmac.compare_digest(self.instance.encode(), instance.encode())

    def report_backlog(self, backlog: int) -> None:
        """Have its stream report how many jobs wait for it, if that has changed."""
        if backlog != self.backlog:
            self.backlog = backlog
            self.wake.set()


def hosted_by_kind(load: fleet_pb2.Load) -> Mapping[str, HostedKind]:
    """Return the items that a service reports to host, by kind."""
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


@dataclass(slots=True, kw_only=True)
class _SeenModel:
    """A model as it was last registered."""

    model: image_pb2.Model
    at: float
    """When a worker of it last came or went."""
    starts: dict[str, float] = field(default_factory=dict)
    """Seconds that its workers took to start, by instance."""


class SeenModels:
    """The models that were seen, at most as many as one service may have; the ones seen longest ago are forgotten.

    A worker that is started again needs as long as its model takes to load: seconds for a small one, minutes for a
    large one on a cold disk. So jobs wait for twice the longest time that its workers took lately. This class does not
    know which workers are here now.

    Args:
        grace_s: How long any model is expected back, at least.
        clock: Clock of the gateway.
    """

    def __init__(self, *, grace_s: float, clock: Clock) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._models: dict[str, _SeenModel] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def get(self, name: str) -> image_pb2.Model | None:
        """Return the model as it was last registered, or None. Do not change it."""
        seen = self._models.get(name)
        return seen.model if seen else None

    def note_presence(self, member: Member, now: float) -> None:
        """Note that a member comes or goes; only workers have models."""
        for model in member.models:
            before = self._models.get(model.name)
            self._models[model.name] = _SeenModel(model=model, at=now, starts=before.starts if before else {})
        while len(self._models) > MAX_MODELS:
            del self._models[min(self._models, key=lambda name: self._models[name].at)]

    def note_start(self, member: Member) -> None:
        """Note how long a member took to start; an instance counts once."""
        for seen in self._of(member):
            starts = seen.starts
            starts.pop(member.instance, None)
            starts[member.instance] = member.load.start_s  # the newest last
            if len(starts) > _MAX_STARTS:
                del starts[next(iter(starts))]

    def is_recent(self, name: str) -> bool:
        """Return whether a worker of the model came or went within its grace."""
        seen = self._models.get(name)
        return seen is not None and seen.at > self._clock.monotonic() - self._grace_of(seen.starts.values())

    def grace_s(self, member: Member) -> float:
        """Return how long to wait for items that a member hosted: as long as for its models, or as its start takes."""
        if member.connected:
            return self._grace_s  # it is not starting, and has dropped something
        starts = (start for seen in self._of(member) for start in seen.starts.values())
        return self._grace_of([member.load.start_s, *starts])

    def _of(self, member: Member) -> list[_SeenModel]:
        return [self._models[model.name] for model in member.models if model.name in self._models]

    def _grace_of(self, starts: Iterable[float]) -> float:
        return max(self._grace_s, min(_STARTS * max(starts, default=0.0), MAX_START_GRACE_S))


class FleetObserver(Protocol):
    """An observer of members that come, change and go. It is called in the event loop and must not block."""

    def member_joined(self, member: Member) -> None:
        """Note that a member has joined, or is back within its lease."""

    def member_changed(self, member: Member) -> None:
        """Note that a member reported its load, or has left for now."""

    def member_lost(self, member: Member) -> None:
        """Note that a member will not come back, so that its attempts are lost."""
