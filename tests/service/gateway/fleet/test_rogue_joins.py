"""Untrusted clients at a gateway: what its public port does not serve, and joins that take nothing from the members."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bottega import errors, kinds
from bottega.client import AsyncClient
from bottega.rpc.channel import open_channel
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, image_pb2
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.running_gateway import Running, refusal, running_gateway


async def _names(house: Running) -> set[str]:
    members = (await house.fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=60)).members
    return {member.registration.name for member in members[1:]}


async def _services(address: str) -> set[str]:
    async with open_channel(address) as channel:
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]  # typed for blocking ones
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([asked]), timeout=60)]
    return {service.name for service in answers[0].list_services_response.service}


async def test_the_public_port_serves_no_fleet(house: Running) -> None:
    rogue = fleet_pb2.Registration(kind=kinds.LORAS, name="s", address="127.0.0.1:9", instance="x" * 16)
    async with open_channel(house.address) as channel:
        fleet: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)
        for call in (
            lambda: fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=60),
            lambda: fleet.Join(iter([fleet_pb2.JoinRequest(registration=rogue)]), timeout=60),
            lambda: fleet.Join(timeout=60),
        ):
            error = await refusal(call)
            if type(error) is errors.InternalError:
                # grpc.aio says so by itself, seldom, where a server ends a stream that its client still writes to.
                error = await refusal(call)
            assert type(error) is errors.MethodNotServed
            assert (error.metadata, "fleet.listen" in error.message) == ({"listener": "fleet"}, True)
    assert await _names(house) == set()


async def test_every_port_says_by_reflection_what_it_serves(house: Running) -> None:
    beside = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert await _services(house.address) == {"bottega.v1.ImageService", *beside}
    assert await _services(house.fleet_address) == {"bottega.v1.FleetService", "bottega.v1.WebhookService", *beside}


async def test_a_service_that_looks_for_the_fleet_at_the_public_port_says_what_to_do(
    house: Running, caplog: pytest.LogCaptureFixture
) -> None:
    worker = ScriptedWorker("w1", house.address)
    with pytest.raises(TimeoutError):
        await worker.start(join_timeout_s=2.0)
    await worker.die()
    warnings = [record for record in caplog.records if record.message == "the fleet refuses this service"]
    # Now and then gRPC ends a stream that is being written with INTERNAL, whatever the server said.
    (said,) = (warning.__dict__["text"] for warning in warnings if warning.__dict__["reason"] == "METHOD_NOT_SERVED")
    assert house.address in said
    assert "Set `gateway`" in said
    assert "127.0.0.1:8472" in said


async def test_pictures_are_drawn_for_those_who_cannot_reach_the_fleets_port(house: Running) -> None:
    await house.worker()
    async with AsyncClient(house.address, fleet_address="127.0.0.1:1") as client:
        assert (await client.generate("a star")).data == b"picture 0"
        assert (await (await client.submit("a star")).result())[0].data == b"picture 0"
        assert await client.models()


async def test_joins_while_a_worker_is_cut_off_for_a_moment_cost_it_nothing(house: Running) -> None:
    worker = await house.worker("w1", hold_at=5)
    job = await house.submit(prompt="a star")
    await worker.arrived.wait()
    assert worker.membership is not None
    await worker.membership.stop()
    for number in range(5):
        rogue = worker.registration()
        rogue.instance = f"rogue {number:020}"
        request = fleet_pb2.JoinRequest(registration=rogue)
        error = await refusal(functools.partial(house.fleet.Join, iter([request])), errors.Unavailable)
        assert error.retry_after_s
    worker.membership.start()
    await worker.membership.joined.wait()
    worker.script.release.set()
    ended = await house.ended(job.job_id)
    assert (ended.state, ended.provenance.attempts) == (image_pb2.JOB_STATE_COMPLETED, 1)


async def test_calls_that_fill_the_public_port_keep_no_worker_out() -> None:
    async with running_gateway(max_streams=8) as house:
        await house.worker("w1", hold_at=1)
        held = await house.submit("held", prompt="a star")
        raw = image_pb2.WatchJobRequest(job_id=held.job_id).SerializeToString()
        async with open_channel(house.address) as channel:
            watch: Any = channel.unary_stream("/bottega.v1.ImageService/WatchJob")
            calls = [watch(raw) for _ in range(40)]
            codes = await asyncio.gather(*map(_refused_at_once, calls))
            assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
            await house.worker("w2")
            assert await _names(house) == {"w1", "w2"}
            for call in calls:
                call.cancel()


async def _refused_at_once(call: Any) -> grpc.StatusCode | None:
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


async def test_the_instance_of_a_member_is_told_to_nobody(house: Running, caplog: pytest.LogCaptureFixture) -> None:
    worker = await house.worker("w1")
    instance = worker.registration().instance
    listed = await house.fleet.ListMembers(fleet_pb2.ListMembersRequest())
    assert {member.registration.name for member in listed.members} == {"gateway", "w1"}
    assert instance.encode() not in listed.SerializeToString()
    assert not any(instance in str(record.__dict__) for record in caplog.records)
