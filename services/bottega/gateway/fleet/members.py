"""A service that has joined the fleet, with what it last reported, and the interface of those who follow the fleet."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bottega import kinds
from bottega.planning import RowFractions, StepTable, StepTimes
from bottega.rpc.channel import Target
from bottega.v1 import fleet_pb2, image_pb2
from bottega.v1.hosted_pb2 import HOSTED_STATE_APPLIED, Hosted


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedKind:
    """What a service hosts of one kind.

    items: what it has; digests: of these. applied: digest and scale of what is in use for all that it computes,
    sorted. switch_s: seconds that it takes to apply other ones.
    """

    items: tuple[Hosted, ...] = ()
    digests: frozenset[str] = frozenset()
    applied: tuple[tuple[str, float], ...] = ()
    switch_s: float = 0.0


_NOTHING_HOSTED = HostedKind()


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A service that has joined.

    load, steps_left, shares, times, fractions, planned, hosted: as it last reported; steps_left is of the attempts that
    it runs, by job; shares are of the tokens that these compute, where that is known; planned is of turns that load
    what masked rows do not compute; hosted is what it hosts, by kind.
    name: unique among those of its kind. is_worker: it draws pictures.
    instance: what its process alone knows, and the gateway never shows. host: where its newest stream comes from.
    stream: counts its Join streams; only the newest one speaks for it.
    backed_off_until: on the monotonic clock; until then it gets nothing new, of jobs or of ControlNets' sessions.
    wake: set when that stream has something to say or shall end; every stream has one of its own.
    """

    registration: fleet_pb2.Registration
    joined_at: float
    heard_at: float
    instance: str = ""
    host: str = ""
    load: fleet_pb2.Load = field(default_factory=fleet_pb2.Load)
    has_reported: bool = False
    """Whether `load` is a report of its own."""
    steps_left: dict[str, int] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    times: StepTimes = field(default_factory=StepTimes)
    fractions: RowFractions = field(default_factory=RowFractions)
    planned: StepTable = field(default_factory=StepTable)
    hosted: Mapping[str, HostedKind] = field(default_factory=dict)
    connected: bool = True
    stream: int = 1
    backlog: int = 0
    backed_off_until: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    # The scheduler reads these of every member in every round, where reading a message would be too slow.
    name: str = field(init=False)
    kind: str = field(init=False)
    is_worker: bool = field(init=False)
    _served: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.kind = self.registration.name, self.registration.kind
        self.is_worker = self.kind == kinds.WORKER
        self._served = frozenset(model.name for model in self.models)

    @property
    def target(self) -> Target:
        """Where it is called, and who must be there."""
        return Target(address=self.registration.address, role=self.kind, name=self.name)

    @property
    def models(self) -> Sequence[image_pb2.Model]:
        """Models that it draws with; what other kinds of services list is none of them."""
        return self.registration.models if self.is_worker else ()

    @property
    def served(self) -> frozenset[str]:
        """Names of its models."""
        return self._served

    @property
    def is_starting(self) -> bool:
        """Whether it is a worker whose engine is not ready: it serves nothing."""
        return self.is_worker and not self._served

    def hosts(self, kind: str) -> HostedKind:
        """What it hosts of a kind."""
        return self.hosted.get(kind, _NOTHING_HOSTED)

    def serves(self, model: str) -> bool:
        """Whether it is a worker of that model."""
        return model in self._served

    def is_instance(self, instance: str) -> bool:
        """Whether it is this very process."""
        return hmac.compare_digest(self.instance.encode(), instance.encode())

    def report_backlog(self, backlog: int) -> None:
        """Has its stream report how many jobs wait for it, if that has changed."""
        if backlog != self.backlog:
            self.backlog = backlog
            self.wake.set()


def hosted_by_kind(load: fleet_pb2.Load) -> Mapping[str, HostedKind]:
    """What a report says of what is hosted."""
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


class FleetObserver(Protocol):
    """Observes members that come, change and go. Called in the event loop; must not block."""

    def member_joined(self, member: Member) -> None:
        """A member has joined, or is back within its lease."""

    def member_changed(self, member: Member) -> None:
        """A member reported its load, or has left for now."""

    def member_lost(self, member: Member) -> None:
        """A member will not come back: what it ran is lost."""
