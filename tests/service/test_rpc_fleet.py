"""A member of the fleet at a gateway's real server: it registers, reports and comes back; what is no report ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from bottega import errors
from bottega.rpc.channel import open_channel
from bottega.rpc.fleet import FleetMembership
from bottega.rpc.server import Server, ServerConfig
from bottega.rpc.status import from_rpc_error
from bottega.v1 import fleet_pb2, fleet_pb2_grpc


class ScriptedFleet(fleet_pb2_grpc.FleetServiceServicer):
    def __init__(self) -> None:
        self.reports: asyncio.Queue[fleet_pb2.JoinRequest] = asyncio.Queue()

    async def Join(
        self, requests: AsyncIterator[fleet_pb2.JoinRequest], context: object
    ) -> AsyncIterator[fleet_pb2.JoinResponse]:
        yield fleet_pb2.JoinResponse(backlog=3)
        async for request in requests:
            await self.reports.put(request)


async def _fleet(listen: str) -> tuple[Server, ScriptedFleet]:
    server = Server("fleet", ServerConfig(listen=listen))
    servicer = ScriptedFleet()  # type: ignore[abstract]
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    return server, servicer


async def test_a_member_registers_reports_and_rejoins_after_the_gateway_came_back() -> None:
    server, fleet = await _fleet("127.0.0.1:0")
    drawn = 0
    member = FleetMembership(
        server.address,
        fleet_pb2.Registration(name="w1"),
        load=lambda: fleet_pb2.Load(memory_bytes=drawn),
    )
    member.start()
    try:
        first = await asyncio.wait_for(fleet.reports.get(), 5)
        assert first.registration.name == "w1"
        assert (await asyncio.wait_for(fleet.reports.get(), 1)).load.memory_bytes == 0
        await asyncio.wait_for(member.joined.wait(), 1)
        assert member.backlog == 3
        drawn = 7
        member.changed()
        assert (await asyncio.wait_for(fleet.reports.get(), 0.3)).load.memory_bytes == 7
        await asyncio.wait_for(fleet.reports.get(), 1.0)  # twice a second without any change

        address = server.address
        await server.stop()
        await asyncio.wait_for(_until(lambda: not member.joined.is_set()), 2)
        server, fleet = await _fleet(address)
        again = await asyncio.wait_for(fleet.reports.get(), 3)
        assert again.registration.name == "w1"
    finally:
        await member.stop()
        await server.stop()


async def test_bytes_that_are_no_request_end_a_stream_of_requests_typed() -> None:
    server, fleet = await _fleet("127.0.0.1:0")
    channel = open_channel(server.address)
    try:
        join: Any = channel.stream_stream("/bottega.v1.FleetService/Join")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [answer async for answer in join(iter([b"", b"\xff\xff\xff"]))]
        assert type(from_rpc_error(caught.value)) is errors.InvalidRequest
        assert fleet.reports.qsize() == 1
    finally:
        await channel.close()
        await server.stop()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)
