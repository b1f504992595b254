"""A service that has joined the fleet, as it last spoke of itself, and who wants to know of its coming and going.

Knows no other member, no jobs and no calls.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bottega import kinds
from bottega.lora.set_key import LoraSetKey
from bottega.planning import StepTimes
from bottega.v1 import fleet_pb2, image_pb2


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A service that has joined.

    load, steps_left, times, loras, patched: as it last reported; steps_left is of the attempts that it runs, by job;
    loras are digests of those that it has at hand, patched is the set in its weights.
    name: unique among those of its kind. is_worker: it draws pictures.
    instance: what its process alone knows, and the gateway never shows. host: where its newest stream comes from.
    stream: counts its Join streams; only the newest one speaks for it.
    rests_until: on the monotonic clock; until then it gets nothing new, of jobs or of ControlNets' sessions.
    wake: set when that stream has something to say or shall end; every stream has one of its own.
    """

    registration: fleet_pb2.Registration
    joined_at: float
    heard_at: float
    instance: str = ""
    host: str = ""
    load: fleet_pb2.Load = field(default_factory=fleet_pb2.Load)
    steps_left: dict[str, int] = field(default_factory=dict)
    times: StepTimes = field(default_factory=StepTimes)
    loras: frozenset[str] = frozenset()
    patched: LoraSetKey = ()
    connected: bool = True
    stream: int = 1
    backlog: int = 0
    rests_until: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    # Asked for of every member at every look of the scheduler, where a message would be too slow to ask.
    name: str = field(init=False)
    kind: str = field(init=False)
    is_worker: bool = field(init=False)
    _served: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.kind = self.registration.name, self.registration.kind
        self.is_worker = self.kind == kinds.WORKER
        self._served = frozenset(model.name for model in self.models)

    @property
    def models(self) -> Sequence[image_pb2.Model]:
        """Models that it draws with; what other kinds of services list is none of them."""
        return self.registration.models if self.is_worker else ()

    def serves(self, model: str) -> bool:
        """Whether it is a worker of that model."""
        return model in self._served

    def is_instance(self, instance: str) -> bool:
        """Whether it is this very process."""
        return hmac.compare_digest(self.instance.encode(), instance.encode())

    def tell_backlog(self, backlog: int) -> None:
        """Lets its stream say how many jobs wait for it, if that is news."""
        if backlog != self.backlog:
            self.backlog = backlog
            self.wake.set()


class FleetObserver(Protocol):
    """Who wants to know. Called in the event loop; must not block."""

    def member_joined(self, member: Member) -> None:
        """A member has joined, or is back within its lease."""

    def member_changed(self, member: Member) -> None:
        """A member reported its load, or has left for now."""

    def member_lost(self, member: Member) -> None:
        """A member will not come back: what it ran is lost."""
