"""A real server's callers that stream their requests: they have a place of their own, and bounds of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from bottega import errors
from bottega.rpc.interceptor.memory_quota import MemoryQuota
from bottega.rpc.status import from_rpc_error
from bottega.v1 import image_pb2, lora_pb2
from tests.fakes.scripted_images import failure, scripted_images, stub, until
from tests.support.waiting import eventually

JOIN = "/bottega.v1.FleetService/Join"
UPLOAD = "/bottega.v1.LoraService/UploadLora"
CHECK = "/grpc.health.v1.Health/Check"
MIB = 1 << 20


async def _failure_of(channel: grpc.aio.Channel, method: str, *raw: bytes) -> errors.BottegaError:
    call: Any = channel.stream_stream(method)  # which any method can be called as
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [answer async for answer in call(iter(raw))]
    return from_rpc_error(caught.value)


async def _joined(channel: grpc.aio.Channel) -> Any:
    method: Any = channel.stream_stream(JOIN)
    call = method()
    await call.write(b"")
    assert await asyncio.wait_for(call.read(), 30) == b""
    return call


async def test_the_fleet_has_its_place_where_others_find_none_and_takes_no_place_of_theirs() -> None:
    async with scripted_images(max_calls=2, peer_share=1.0) as (_, servicer, channel):
        ordered = [stub(channel).GetJob(image_pb2.GetJobRequest(job_id="wait")) for _ in range(2)]
        await eventually(lambda: servicer.waiting == 2)
        refused = from_rpc_error(await failure(channel, "one more"))
        assert (type(refused), refused.metadata) == (errors.QueueFull, {"limit": "max_calls"})
        joined = [await _joined(channel) for _ in range(2)]
        assert type(await _failure_of(channel, JOIN, b"")) is errors.QueueFull
        for call in ordered:
            call.cancel()
        await until(channel, refused=False)
        for call in joined:
            call.cancel()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that do not come are waited for, also when others wait for their room: these are refused."""
    monkeypatch.setitem(MemoryQuota.__init__.__kwdefaults__, "contended_s", 600.0)  # type: ignore[arg-type]


@pytest.mark.usefixtures("patient")
async def test_first_messages_come_in_only_as_far_as_there_is_room_and_the_fleet_has_room_of_its_own() -> None:
    async with scripted_images(max_message_mib=1, max_requests_mib=2) as (_, _, channel):
        silent: list[Any] = [channel.stream_stream("/bottega.v1.ImageService/GetJob") for _ in range(2)]
        calls = [method() for method in silent]  # each has the room of a message that does not come
        await asyncio.sleep(0.1)
        joined = await _joined(channel)
        join: Any = channel.stream_stream(JOIN)
        others = [join() for _ in range(2)]  # they have the fleet's
        await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_joined(channel), 0.5)
        await joined.write(b"")  # a member needs none
        assert await asyncio.wait_for(joined.read(), 30) == b""
        for call in (*calls, joined, *others):
            call.cancel()


@pytest.mark.parametrize(
    ("method", "fits", "beyond"),
    [
        pytest.param(JOIN, 1 * MIB, 2 * MIB, id="Join"),
        pytest.param(UPLOAD, 4 * MIB, 5 * MIB, id="UploadLora"),
    ],
)
@pytest.mark.parametrize("before", [0, 1], ids=["first", "later"])
async def test_no_message_of_a_stream_is_larger_than_its_method_needs(
    method: str, fits: int, beyond: int, before: int
) -> None:
    def message(size_bytes: int) -> bytes:  # of both methods; field 1 is in each another message, field 15 nobody's
        return lora_pb2.UploadLoraRequest(chunk=b"").SerializeToString() if not size_bytes else _unknown(size_bytes)

    async with scripted_images() as (_, _, channel):
        call: Any = channel.stream_stream(method)
        first = [message(0)] * before
        assert [answer async for answer in call(iter([*first, message(fits)]))]
        refused = await _failure_of(channel, method, *first, message(beyond))
        assert type(refused) is errors.TooLarge
        assert refused.metadata == {"limit": "message", "bytes": str(beyond)}


def _unknown(size_bytes: int) -> bytes:
    """A message of little more bytes, in a field that no message has."""
    return b"\x7a" + _varint(size_bytes) + bytes(size_bytes)


def _varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14 & 0x7F | 0x80, number >> 21])


async def test_what_grpcs_own_services_are_asked_is_bounded_too_and_they_answer_as_ever() -> None:
    async with scripted_images() as (_, _, channel):
        request = health_pb2.HealthCheckRequest(service="x" * MIB).SerializeToString()
        assert type(await _failure_of(channel, CHECK, request)) is errors.TooLarge
        check: Any = channel.unary_unary(CHECK)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(health_pb2.HealthCheckRequest(service="nobody").SerializeToString())
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.usefixtures("patient")
async def test_silent_clients_hold_up_neither_health_nor_the_fleet() -> None:
    async with scripted_images(max_message_mib=1, max_requests_mib=1) as (_, _, channel):
        silent = _silent_calls(channel)
        joined = await _joined(channel)
        check: Any = channel.unary_unary(CHECK)
        await asyncio.wait_for(check(health_pb2.HealthCheckRequest().SerializeToString()), 30)
        for call in (*silent, joined):
            call.cancel()


async def test_silent_clients_are_not_waited_for_where_others_wait() -> None:
    async with scripted_images(max_message_mib=1, max_requests_mib=1) as (_, _, channel):
        silent = _silent_calls(channel)
        await asyncio.sleep(0.1)
        crowd = _silent_calls(channel, 10)
        assert type(from_rpc_error(await _end_of(silent[-1]))) is errors.QueueFull
        for call in (*silent, *crowd):
            call.cancel()


def _silent_calls(channel: grpc.aio.Channel, count: int = 4) -> list[Any]:
    ask: Any = channel.stream_stream(CHECK)
    reflect: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    return [method() for method in (ask, reflect) for _ in range(count)]


async def _end_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), 30)
    return caught.value
