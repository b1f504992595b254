"""A member of the fleet with its last report."""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bottega import kinds
from bottega.planning import RowFractions, StepTable, StepTimes
from bottega.rpc.channel import Target
from bottega.v1 import fleet_pb2, image_pb2
from bottega.v1.hosted_pb2 import HOSTED_STATE_APPLIED, Hosted


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedKind:
    """The items of one kind that a service hosts."""

    items: tuple[Hosted, ...] = ()
    digests: frozenset[str] = frozenset()
    """Digests of the items."""
    applied: tuple[tuple[str, float], ...] = ()
    """Digest and scale of each item that everything the service computes uses, such as merged LoRAs; sorted."""
    switch_s: float = 0.0
    """Seconds to replace the applied items by others."""


_NOTHING_HOSTED = HostedKind()


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A service that has joined, with its last report."""

    registration: fleet_pb2.Registration
    joined_at: float
    heard_at: float
    lease_until: float = math.inf
    """Time at which the member is lost unless it reports before."""
    instance: str = ""
    """Random id of its process, which proves identity and is never shown."""
    host: str = ""
    """Host of its newest stream."""
    load: fleet_pb2.Load = field(default_factory=fleet_pb2.Load)
    has_reported: bool = False
    """Whether `load` was reported by the member; else it is the default."""
    steps_left: dict[str, int] = field(default_factory=dict)
    """Remaining steps of the attempts that it runs, by job."""
    shares: dict[str, float] = field(default_factory=dict)
    """Shares of the tokens that these attempts compute, by job; without attempts whose share is unknown."""
    times: StepTimes = field(default_factory=StepTimes)
    fractions: RowFractions = field(default_factory=RowFractions)
    planned: StepTable = field(default_factory=StepTable)
    """Planned seconds of turns with masked rows, including the loads of their recorded activations."""
    hosted: Mapping[str, HostedKind] = field(default_factory=dict)
    """Hosted items, by kind."""
    connected: bool = True
    stream: int = 1
    """Number of Join streams it has opened. Reports of older streams are ignored."""
    backlog: int = 0
    """Number of jobs that wait for it, as last sent over its stream."""
    backed_off_until: float = 0.0
    """Time until which it gets no new jobs or ControlNet sessions, on the monotonic clock."""
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
        """Send the number of jobs that wait for it over its stream, if it has changed."""
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
