"""A member of the fleet, that is, a service that has joined the gateway, with its last report."""

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
    _served: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.kind = self.registration.name, self.registration.kind
        self.is_worker = self.kind == kinds.WORKER
        self._served = frozenset(model.name for model in self.models)

    @property
    def target(self) -> Target:
        """The member's address, and the identity that its certificate must have."""
        return Target(address=self.registration.address, role=self.kind, name=self.name)

    @property
    def models(self) -> Sequence[image_pb2.Model]:
        """Models that the worker serves; empty for other kinds of services."""
        return self.registration.models if self.is_worker else ()

    @property
    def served(self) -> frozenset[str]:
        """Names of `models`."""
        return self._served

    @property
    def is_starting(self) -> bool:
        """Whether the member is a worker whose engine is not ready, so that it serves no model yet."""
        return self.is_worker and not self._served

    def hosts(self, kind: str) -> HostedKind:
        """Return the items of a kind that the member hosts."""
        return self.hosted.get(kind, _NOTHING_HOSTED)

    def serves(self, model: str) -> bool:
        """Return whether the member is a worker that serves the model."""
        return model in self._served

    def is_instance(self, instance: str) -> bool:
        """Return whether the member is the process with this secret."""
        return hmac.compare_digest(self.instance.encode(), instance.encode())

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
