"""Membership of a service in the fleet: one Join stream to each gateway.

Each gateway gets every report, so each knows the whole fleet and can become the scheduler at any time. The streams do
not depend on each other: a gateway that is away or refuses the service disturbs no other one.

Callbacks provide the load for reports, and receive the number of waiting requests, the addresses of other services and
the scheduler.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from bottega import kinds
from bottega.background_tasks import BackgroundTasks
from bottega.clocks import seconds_until_tick
from bottega.errors import StaleScheduler
from bottega.rpc.address import is_name, resolve, split_list
from bottega.rpc.channel import PLAINTEXT, Channels
from bottega.rpc.gateway_membership import GatewayMembership
from bottega.rpc.security.caller import Identity
from bottega.v1 import fleet_pb2

_INSTANCE_BYTES = 16
# Seconds between two look-ups of a DNS name of the gateways. A gateway that is added waits so long for its fleet.
_RESOLVE_INTERVAL_S = 5.0
# Successful look-ups in a row without an address before a joined gateway is left: a gateway that is not ready for a
# moment, or an answer that has only some of the addresses, must not end a stream that works.
_MAX_MISSED = 3
# Seconds after which a generation of the scheduler that no gateway names is forgotten; a frozen gateway wakes before.
_FORGET_S = 60.0

_log = logging.getLogger(__name__)


class Listening(Protocol):
    """The facts about a started server that a registration needs."""

    @property
    def channels(self) -> Channels:
        """Opens the gRPC channels of the process."""

    @property
    def identity(self) -> Identity | None:
        """Identity in the server's certificate; None without TLS."""

    @property
    def address(self) -> str:
        """host:port of the server's gRPC port."""

    @property
    def metrics_address(self) -> str:
        """host:port of the server's metrics."""


class StartingServer(Listening, Protocol):
    """A server that can set its health and report the progress of a long start to systemd."""

    async def set_serving(self, serving: bool) -> None:
        """Set whether health says SERVING."""

    def extend_start(self, status: str, *, within_s: float) -> None:
        """Report the progress of the start to systemd, and in how many seconds the next report comes."""


def registration_of(server: Listening, *, kind: str, name: str, device: str = "") -> fleet_pb2.Registration:
    """Return the registration of a service that runs behind this server."""
    return fleet_pb2.Registration(
        kind=kind,
        name=name,
        address=server.address,
        version=importlib.metadata.version("bottega-services"),
        metrics_address=server.metrics_address,
        device=device,
    )


def _with_instance(registration: fleet_pb2.Registration) -> fleet_pb2.Registration:
    """Add a random instance ID to a registration, which distinguishes processes of the same name."""
    whole = fleet_pb2.Registration(instance=secrets.token_hex(_INSTANCE_BYTES))
    whole.MergeFrom(registration)
    return whole


def _ignore(_: object) -> None:
    """Ignore the value."""


class _GatewayName:
    """A DNS name of gateways, and the addresses that its look-ups found.

    Args:
        name: The name with a port.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._missed: dict[str, int] = {}  # look-ups in a row without the address, by address
        self._failed = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses to join; the name itself, which gRPC resolves, before any look-up has found some."""
        return tuple(self._missed) or (self.name,)

    async def look_up(self, is_joined: Callable[[str], bool]) -> None:
        """Look the name up. If that fails, or finds nothing, the known addresses stay.

        Args:
            is_joined: Returns whether the service is a member at an address, which is then not dropped at once.
        """
        try:
            found = await resolve(self.name)
        except OSError as error:
            if not self._failed:
                facts = {"gateway": self.name, "text": str(error)}
                _log.warning("the name of the gateways is not resolved; their last addresses stay", extra=facts)
            self._failed = True
            return
        self._failed = False
        if not found:
            return
        kept = {
            address: missed + 1
            for address, missed in self._missed.items()
            if address not in found and missed + 1 < _MAX_MISSED and is_joined(address)
        }
        # A gateway must not be joined by IPv4 and IPv6 at once: each stream would end the other.
        mixed = any(address.startswith("[") != found[0].startswith("[") for address in kept)
        self._missed = kept if mixed else kept | dict.fromkeys(found, 0)


class FleetMembership:
    """A service's membership in the fleet: it joins all gateways, and combines what they respond.

    It reports the load on change and as often as asked, and rejoins with back-off.

    Callbacks are called in the event loop.

    Args:
        gateways: The gateways' fleet listeners: host:port, or a list (rpc.address). A DNS name that has several
            addresses stands for a gateway at each; it is looked up again all the time.
        registration: Registration of this service, which is sent first on every stream. An instance is added if it has
            none.
        load: Returns the load for a report. Must be quick.
        on_backlog: Called with the number of requests that wait for this service.
        on_services: Called, at every response, with the services of the kinds that this service uses.
        on_scheduler: Called, at every response, with the newest generation of the scheduler's lease that a gateway
            names; 0 if none names any.
        on_targets: Called with the number of services that a scaler's pools should run, by the newest scheduler.
        channels: Opens the gRPC channels of the process.
    """

    def __init__(
        self,
        gateways: str,
        registration: fleet_pb2.Registration,
        *,
        load: Callable[[], fleet_pb2.Load],
        on_backlog: Callable[[int], None] = _ignore,
        on_services: Callable[[Sequence[fleet_pb2.ServiceAddress]], None] = _ignore,
        on_scheduler: Callable[[int], None] = _ignore,
        on_targets: Callable[[Sequence[fleet_pb2.PoolTarget]], None] = _ignore,
        channels: Channels = PLAINTEXT,
    ) -> None:
        listed = split_list(gateways)
        self._fixed = [address for address in listed if not is_name(address)]
        self._names = [_GatewayName(address) for address in listed if is_name(address)]
        self._registration = _with_instance(registration)
        self._load = load
        self._on_backlog = on_backlog
        self._on_services = on_services
        self._on_scheduler = on_scheduler
        self._on_targets = on_targets
        self._channels = channels
        self._members: dict[str, GatewayMembership] = {}
        self._tasks = BackgroundTasks("joining of gateways")
        self._warned = False
        self.joined = asyncio.Event()
        """Set while the service is a member at one gateway at least."""

    @property
    def backlog(self) -> int:
        """Number of requests that wait for this service, at the gateway where most wait: only the scheduler counts."""
        return max((member.backlog for member in self._members.values()), default=0)

    @property
    def gateways(self) -> tuple[str, ...]:
        """Addresses of the gateways that the service has joined."""
        return tuple(address for address, member in self._members.items() if member.joined)

    def start(self) -> None:
        """Join in the background."""
        if self._members or self._tasks:
            return
        self._follow(self._fixed)
        if self._names:
            self._tasks.start(self._resolve())

    def report_soon(self) -> None:
        """Report the changed load without waiting for the next regular report."""
        for member in self._members.values():
            member.report_soon()

    async def stop(self) -> None:
        """Leave the fleet. Does nothing before `start`, which may follow again."""
        await self._tasks.cancel()
        members, self._members = self._members, {}
        await asyncio.gather(*(member.stop() for member in members.values()))
        self.joined.clear()

    def _follow(self, addresses: Sequence[str]) -> None:
        """Join the gateways at these addresses, and leave all others."""
        for address in self._members.keys() - set(addresses):
            self._tasks.start(self._members.pop(address).stop())
        for address in addresses:
            if address not in self._members:
                member = self._members[address] = GatewayMembership(
                    address,
                    self._registration,
                    load=self._load,
                    on_change=self._on_change,
                    channels=self._channels,
                )
                member.start()

    async def _resolve(self) -> None:
        """Follow the addresses of DNS names."""
        while True:
            for name in self._names:
                await name.look_up(lambda address: address in self.gateways)
            self._follow([*self._fixed, *(address for name in self._names for address in name.addresses)])
            await asyncio.sleep(seconds_until_tick(_RESOLVE_INTERVAL_S))

    def _on_change(self) -> None:
        """Pass on what the gateways have responded. While none is joined, what they responded last stays valid."""
        joined = sorted((member for member in self._members.values() if member.joined), key=lambda one: one.heard_s)
        if not joined:
            self.joined.clear()
            return
        self.joined.set()
        self._check_shared(joined)
        self._on_scheduler(max(member.generation for member in joined))
        self._on_backlog(self.backlog)
        services = {(one.kind, one.name): one for member in joined for one in member.services}  # the newest wins
        self._on_services([services[key] for key in sorted(services)])
        schedulers = [member for member in joined if member.targets]
        if schedulers:
            self._on_targets(max(schedulers, key=lambda member: (member.generation, member.heard_s)).targets)

    def _check_shared(self, joined: Sequence[GatewayMembership]) -> None:
        """Log once if gateways that do not share their jobs share a worker."""
        alone = [member.address for member in joined if not member.shares_jobs]
        if len(joined) > 1 and alone and not self._warned and self._registration.kind == kinds.WORKER:
            self._warned = True
            facts = {
                "gateways": ", ".join(alone),
                "todo": "give them `jobs: postgresql://...`, or list one gateway only",
            }
            _log.error("gateways share a worker and not their jobs, so each stops the jobs of the others", extra=facts)


class SchedulerFence:
    """Refuses the calls of a gateway that is not the scheduler any more.

    Only what joined gateways name counts, so no call can lock the others out. A generation that none of them names is
    forgotten after a while: it comes from a database that was made anew, whose generations begin at 1 again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest = self._named = 0
        self._doubted_at = math.inf

    def note(self, generation: int) -> None:
        """Note the newest generation that a joined gateway names; 0 if none names any."""
        self._named = generation
        if generation < self._newest:
            self._doubted_at = min(self._doubted_at, self._clock())
        else:
            self._newest, self._doubted_at = generation, math.inf

    def check(self, generation: int) -> None:
        """Raise StaleScheduler if a call comes from a gateway with an older generation than the newest."""
        if self._clock() >= self._doubted_at + _FORGET_S:
            self._newest, self._doubted_at = self._named, math.inf
        if generation < self._newest:
            text = f"the gateway with generation {generation} is not the scheduler; the worker follows {self._newest}"
            raise StaleScheduler(text, metadata={"generation": str(self._newest)})
