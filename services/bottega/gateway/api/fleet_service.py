"""FleetService: the stream of each service that joins the fleet, the list of members, and what Prometheus scrapes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc
import psutil

from bottega import kinds
from bottega.addons.interface.store_link import MAX_SERVICES, rank_stores
from bottega.addons.interface.views import Member
from bottega.clocks import Clock
from bottega.errors import DeadlinePassed, Draining, Forbidden, InvalidRequest, MethodNotServed, Violation
from bottega.gateway.api.reservations import Reservations
from bottega.gateway.config import DEFAULT_FLEET_ADDRESS
from bottega.gateway.fleet.join_limits import PendingJoins
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.scheduling.controller import JobController
from bottega.process.memory import resident_bytes
from bottega.rpc.address import host_of, is_any_host, split
from bottega.rpc.interceptor.call_limits import full
from bottega.rpc.security.caller import Caller, Role, caller
from bottega.v1 import fleet_pb2, fleet_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
_Requests = AsyncIterator[fleet_pb2.JoinRequest]
# Time between two messages to a member on how many jobs wait for it: a fraction of a turn. Under a flood of submissions
# the number changes all the time.
_PAUSE_S = 0.015
# Time for members to report after the fleet was at rest, so that a list shows their load as it is.
_WAKE_S = 0.1

TARGETS_PATH = "/targets"
"""HTTP path of the list of Prometheus scrape targets, on the port of the gateway's own /metrics."""


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """The gRPC service through which services join the fleet and find each other.

    Args:
        this: Registration of the gateway itself. The server fills in the address once it listens.
        activity: Returns the gateway's counters.
        scheduler: Returns the lease of the gateway that schedules; None if there is only one gateway.
        at_scheduler: Lists at the gateway that schedules; None if that is this one, or another does not answer.
        reservations: Places in the queue for jobs that other gateways store.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        controller: JobController,
        this: fleet_pb2.Registration,
        activity: Callable[[], fleet_pb2.Activity],
        clock: Clock,
        scheduler: Callable[[], fleet_pb2.SchedulerLease | None],
        at_scheduler: Callable[
            [fleet_pb2.ListMembersRequest, _Context], Awaitable[fleet_pb2.ListMembersResponse | None]
        ],
        reservations: Reservations,
    ) -> None:
        self._fleet = fleet
        self._queue = controller.queue
        self._demand = controller.demand
        self._this = this
        self._activity = activity
        self._scheduler = scheduler
        self._at_scheduler = at_scheduler
        self._reservations = reservations
        self._clock = clock
        self._began = clock.monotonic()
        self._pending = PendingJoins()

    async def Join(self, request_iterator: _Requests, context: _Context) -> AsyncIterator[fleet_pb2.JoinResponse]:
        """Serve the join stream of a service: receive its registration and load reports, send it updates."""
        peer = context.peer()
        with self._pending.slot(host_of(peer)) as crowded_out:
            first = await self._first(request_iterator, crowded_out)
        registration = _registration(first)
        _check_name(registration, caller())
        member = self._fleet.join(registration, peer=peer)
        del first
        stream, wake = member.stream, member.wake
        listening = asyncio.create_task(self._listen(request_iterator, member, stream))
        try:
            while member.connected and member.stream == stream:
                wake.clear()
                yield fleet_pb2.JoinResponse(
                    backlog=member.backlog,
                    services=self._services_for(member),
                    report_every_s=self._fleet.report_every_s,
                    scheduler=self._scheduler(),
                    targets=self._targets(member),
                )
                await asyncio.sleep(_PAUSE_S)
                await wake.wait()
            if member.stream == stream:
                await listening  # it has ended, perhaps with an error
        finally:
            self._fleet.leave(member, stream)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def ListMembers(
        self, request: fleet_pb2.ListMembersRequest, context: _Context
    ) -> fleet_pb2.ListMembersResponse:
        """List the members, the gateway itself first. The queue is that of the gateway that schedules."""
        if self._fleet.wake_up():
            await asyncio.sleep(_WAKE_S)
        now = self._clock.monotonic()
        memory_bytes = await asyncio.to_thread(_memory_bytes)
        load = fleet_pb2.Load(memory_bytes=memory_bytes, activity=self._activity())
        this = fleet_pb2.Member(registration=self._this, load=load, joined_s=now - self._began)
        others = [_message(member, now) for member in self._fleet.members()]
        answer = fleet_pb2.ListMembersResponse(
            members=[this, *others],
            queued=len(self._queue),
            longest_wait_s=self._queue.longest_wait_s(),
            refused=[_message(member, now) for member in self._fleet.refused],
            scheduler=self._scheduler(),
            demand=self._demand.demand,
        )
        if (scheduler := await self._at_scheduler(request, context)) is not None:
            answer.queued, answer.longest_wait_s = scheduler.queued, scheduler.longest_wait_s
            del answer.demand[:]
            answer.demand.extend(scheduler.demand)
        return answer

    async def AdmitJobs(self, request: fleet_pb2.AdmitJobsRequest, context: _Context) -> fleet_pb2.AdmitJobsResponse:
        """Reserve places for jobs that another gateway is about to store, and queue those that it has stored."""
        return await self._reservations.admit(request)

    def _targets(self, member: Member) -> Sequence[fleet_pb2.PoolTarget]:
        """Return a scaler's targets, if this gateway schedules: only its queue has the jobs that wait."""
        lease = self._scheduler()
        return self._demand.targets(member) if lease is None or lease.name == self._this.name else ()

    def _services_for(self, member: Member) -> list[fleet_pb2.ServiceAddress]:
        return [
            fleet_pb2.ServiceAddress(kind=kind, name=service.name, address=service.registration.address)
            for kind in member.registration.uses
            for service in self._used(kind, member)[:MAX_SERVICES]
        ]

    def _used(self, kind: str, member: Member) -> list[Member]:
        """Return the services of a kind that a member may use: of workers with one role, those of its model.

        Of many, each worker uses others, so that all have work.
        """
        services = self._fleet.services(kind)
        if kind not in kinds.STAGES:
            return services
        by_name = {service.name: service for service in services if service.computes_stage_for(member)}
        return [by_name[name] for name in rank_stores(by_name, member.name)]

    async def _first(self, requests: _Requests, crowded_out: asyncio.Future[None]) -> fleet_pb2.JoinRequest | None:
        """Return the first message, or None if the stream ends first. Raises DeadlinePassed, Draining or QueueFull."""
        reading = asyncio.ensure_future(anext(aiter(requests), None))
        closing = asyncio.create_task(self._fleet.closed.wait())
        try:
            await asyncio.wait(
                (reading, closing, crowded_out),
                timeout=self._fleet.lease_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if reading.done():
                return reading.result()
        finally:
            for task in (reading, closing):
                task.cancel()
            await asyncio.gather(reading, closing, return_exceptions=True)
        if self._fleet.closed.is_set():
            raise Draining("the gateway is stopping")
        if crowded_out.done():
            raise full("too many streams have not sent their registration yet, this one included", limit="joins")
        raise DeadlinePassed(f"no registration came within {self._fleet.lease_s:g} s")

    async def _listen(self, requests: _Requests, member: Member, stream: int) -> None:
        """Process a member's reports until its stream ends or another stream replaces it."""
        wake = member.wake
        try:
            async for request in requests:
                if member.stream != stream:
                    return
                if request.HasField("load"):
                    self._fleet.report(member, request.load)
                elif not request.HasField("registration"):
                    self._fleet.report_unchanged(member)
        finally:
            self._fleet.leave(member, stream)
            wake.set()


class FleetNotServedHere(fleet_pb2_grpc.FleetServiceServicer):
    """The FleetService of the public port, which refuses all calls because fleet calls belong on the fleet port."""

    def Join(self, request_iterator: _Requests, context: _Context) -> AsyncIterator[fleet_pb2.JoinResponse]:
        """Refuse a join."""
        raise _elsewhere()

    async def ListMembers(
        self, request: fleet_pb2.ListMembersRequest, context: _Context
    ) -> fleet_pb2.ListMembersResponse:
        """Refuse a list."""
        raise _elsewhere()

    async def AdmitJobs(self, request: fleet_pb2.AdmitJobsRequest, context: _Context) -> fleet_pb2.AdmitJobsResponse:
        """Refuse jobs."""
        raise _elsewhere()


def _elsewhere() -> MethodNotServed:
    return MethodNotServed(
        "the fleet is not served on this port of the gateway, but on another one: fleet.listen of its configuration,"
        f" {DEFAULT_FLEET_ADDRESS} unless that says otherwise",
        metadata={"listener": "fleet"},
    )


def _check_name(registration: fleet_pb2.Registration, known: Caller) -> None:
    """Raise Forbidden if a service joins under a name that is not in its certificate."""
    if known.role is Role.LOCAL or (registration.kind, registration.name) == (known.role, known.name):
        return
    joins, shown = f"{registration.kind}/{registration.name}", f"{known.role}/{known.name}"
    raise Forbidden(f"{joins} joins with the certificate of {shown}: give it that name or a certificate of its own")


def _registration(first: fleet_pb2.JoinRequest | None) -> fleet_pb2.Registration:
    if first is None or not first.HasField("registration"):
        rule = "must be in the first message"
        raise InvalidRequest(f"registration: {rule}", violations=[Violation(field="registration", description=rule)])
    return first.registration


def _message(member: Member, now: float) -> fleet_pb2.Member:
    return fleet_pb2.Member(
        registration=member.registration,
        load=member.load if member.has_reported else None,
        joined_s=now - member.joined_at,
        heard_s=now - member.heard_at,
    )


def _memory_bytes() -> int:
    this = psutil.Process()
    return resident_bytes([this.pid, *(child.pid for child in this.children(recursive=True))])


def scrape_targets(registrations: Iterable[fleet_pb2.Registration]) -> str:
    """Return the Prometheus scrape targets as JSON: one entry for each service that has metrics.

    Each target has the kind of the service as the label `service` and its name as `instance`. Both stay the same when
    the service restarts on another port.
    """
    groups = [
        {"targets": [_scrape_target(service)], "labels": {"service": service.kind, "instance": service.name}}
        for service in registrations
        if service.metrics_address
    ]
    return json.dumps(groups)


def _scrape_target(registration: fleet_pb2.Registration) -> str:
    host, port = split(registration.metrics_address)
    if is_any_host(registration.metrics_address):  # it is scraped at the host of its call address
        host, _ = split(registration.address)
    return f"{host}:{port}"
