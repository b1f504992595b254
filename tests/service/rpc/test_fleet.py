"""A member of the fleet at a gateway's real server: it registers, reports and comes back; what is no report ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from bottega import errors
from bottega.rpc import gateway_membership
from bottega.rpc.channel import PLAINTEXT
from bottega.rpc.fleet_membership import FleetMembership
from bottega.rpc.gateway_membership import GatewayMembership
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from bottega.v1 import fleet_pb2, fleet_pb2_grpc
from tests.fakes.scripted_images import ScriptedFleet
from tests.support.waiting import eventually


class FullFleet(fleet_pb2_grpc.FleetServiceServicer):
    """Refuses the first six joins."""

    def __init__(self) -> None:
        self.seen: list[fleet_pb2.Registration] = []

    async def Join(
        self, requests: AsyncIterator[fleet_pb2.JoinRequest], context: object
    ) -> AsyncIterator[fleet_pb2.JoinResponse]:
        self.seen.append((await anext(aiter(requests))).registration)
        if len(self.seen) <= 6:
            raise errors.FleetFull("no room", retry_after_s=0.2)
        yield fleet_pb2.JoinResponse()
        await asyncio.sleep(60)


@contextlib.asynccontextmanager
async def _serving(fleet: fleet_pb2_grpc.FleetServiceServicer, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Yield the address of a server with this service."""
    server = Server("fleet", ServerConfig(listen=listen))
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server.grpc)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def _joining(address: str, load: Callable[[], fleet_pb2.Load] = fleet_pb2.Load) -> AsyncIterator[FleetMembership]:
    member = FleetMembership(address, fleet_pb2.Registration(name="w1"), load=load)
    member.start()
    try:
        yield member
    finally:
        await member.stop()


async def test_a_member_registers_reports_and_rejoins_after_the_gateway_came_back() -> None:
    fleet = ScriptedFleet(backlog=3)  # type: ignore[abstract]
    drawn = 0
    async with contextlib.AsyncExitStack() as first:
        address = await first.enter_async_context(_serving(fleet))
        async with _joining(address, lambda: fleet_pb2.Load(memory_bytes=drawn)) as member:
            assert (await asyncio.wait_for(fleet.reports.get(), 20)).registration.name == "w1"
            assert (await asyncio.wait_for(fleet.reports.get(), 20)).WhichOneof("message") == "load"
            await asyncio.wait_for(member.joined.wait(), 20)
            assert member.backlog == 3
            assert await asyncio.wait_for(fleet.reports.get(), 20) == fleet_pb2.JoinRequest()  # nothing has changed
            drawn = 7
            await eventually(lambda: not fleet.reports.empty() and fleet.reports.get_nowait().load.memory_bytes == 7)
            await first.aclose()
            await eventually(lambda: not member.joined.is_set())
            fleet = ScriptedFleet()  # type: ignore[abstract]
            async with _serving(fleet, address):
                assert (await asyncio.wait_for(fleet.reports.get(), 20)).registration.name == "w1"


class RestingFleet(fleet_pb2_grpc.FleetServiceServicer):
    """Asks for few reports, and for many as soon as `busy` is set."""

    def __init__(self, *, rest_s: float = 600.0) -> None:
        self.rest_s = rest_s
        self.busy = asyncio.Event()
        self.reports: asyncio.Queue[fleet_pb2.JoinRequest] = asyncio.Queue()

    async def Join(
        self, requests: AsyncIterator[fleet_pb2.JoinRequest], context: object
    ) -> AsyncIterator[fleet_pb2.JoinResponse]:
        async def take() -> None:
            async for request in requests:
                await self.reports.put(request)

        taking = asyncio.create_task(take())
        yield fleet_pb2.JoinResponse(report_every_s=self.rest_s)
        await self.busy.wait()
        yield fleet_pb2.JoinResponse(report_every_s=0.5)
        await taking


async def test_a_member_reports_changes_alone_while_the_fleet_rests_and_at_once_when_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_membership, "_MAX_REPORT_INTERVAL_S", 1e9)
    fleet = RestingFleet(rest_s=1e9)  # type: ignore[abstract]
    drawn = 0
    async with _serving(fleet) as address, _joining(address, lambda: fleet_pb2.Load(memory_bytes=drawn)) as member:
        kinds = [(await asyncio.wait_for(fleet.reports.get(), 20)).WhichOneof("message") for _ in range(2)]
        assert kinds == ["registration", "load"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fleet.reports.get(), 2 * gateway_membership.REPORT_INTERVAL_S)
        drawn = 7
        member.report_soon()
        assert (await asyncio.wait_for(fleet.reports.get(), 20)).load.memory_bytes == 7
        fleet.busy.set()
        assert await asyncio.wait_for(fleet.reports.get(), 20) == fleet_pb2.JoinRequest()


@pytest.mark.parametrize("rest_s", [1e9, math.inf, math.nan])
async def test_a_member_reports_sometimes_whatever_the_gateway_asks_for(
    rest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_membership, "_MAX_REPORT_INTERVAL_S", 0.1)
    fleet = RestingFleet(rest_s=rest_s)  # type: ignore[abstract]
    async with _serving(fleet) as address, _joining(address):
        for _ in range(4):  # the registration, the load, and two reports without news
            await asyncio.wait_for(fleet.reports.get(), 20)


async def test_a_member_that_is_refused_comes_again_when_the_gateway_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_BACK_OFF_S", "_REFUSED_BACK_OFF_S"):
        monkeypatch.setattr(gateway_membership, name, 120.0)  # its own back-off, which is a minute or more for each try
    fleet = FullFleet()  # type: ignore[abstract]
    async with _serving(fleet) as address, _joining(address) as member:
        await asyncio.wait_for(member.joined.wait(), 50)
        (instance,) = {registration.instance for registration in fleet.seen}
        assert len(instance) >= 16
        assert len(fleet.seen) == 7


class SlowToRefuse(fleet_pb2_grpc.FleetServiceServicer):
    """Takes what comes for a moment, and refuses."""

    def __init__(self) -> None:
        self.came = Counter[str]()
        self.refused = 0

    async def Join(
        self, requests: AsyncIterator[fleet_pb2.JoinRequest], context: object
    ) -> AsyncIterator[fleet_pb2.JoinResponse]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                async for request in requests:
                    self.came[request.WhichOneof("message") or ""] += 1
        self.refused += 1
        if self.refused:
            raise errors.FleetFull("no room", retry_after_s=0.1)
        yield fleet_pb2.JoinResponse()


async def test_nothing_is_reported_before_the_gateway_has_answered() -> None:
    """It would be written while the gateway refuses at times, and gRPC would lose the refusal."""
    fleet = SlowToRefuse()  # type: ignore[abstract]
    async with _serving(fleet) as address, _joining(address):
        await eventually(lambda: fleet.refused >= 2)
        assert fleet.came.keys() == {"registration"}


async def test_a_stream_that_ends_without_the_gateways_word_is_no_refusal(caplog: pytest.LogCaptureFixture) -> None:
    member = GatewayMembership(
        "127.0.0.1:1", fleet_pb2.Registration(), load=fleet_pb2.Load, on_change=lambda: None, channels=PLAINTEXT
    )
    await member._on_failure(errors.InternalError("the call failed"), answered=False)
    await member._on_failure(errors.InternalError("a bug"), answered=True)
    assert [record.message for record in caplog.records] == [
        "the gateway's fleet listener cannot be reached",
        "the fleet refuses this service",
    ]


async def test_a_gateway_that_is_not_there_is_logged_and_not_every_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_membership, "_SILENCE_S", 0.3)
    with caplog.at_level(logging.WARNING):
        async with _joining("127.0.0.1:1"):
            await eventually(lambda: bool(caplog.records))
            await asyncio.sleep(1.0)
    (record,) = caplog.records
    assert (record.message, vars(record)["gateway"]) == (
        "the gateway's fleet listener cannot be reached",
        "127.0.0.1:1",
    )
    assert "is a gateway running" in vars(record)["todo"]


async def test_every_process_that_joins_is_an_instance_of_its_own() -> None:
    registration = fleet_pb2.Registration(name="w1")
    members = [FleetMembership("127.0.0.1:1", registration, load=fleet_pb2.Load) for _ in range(2)]
    assert len({member._registration.instance for member in members}) == 2
    assert not registration.instance
