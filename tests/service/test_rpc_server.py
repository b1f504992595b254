"""A real server on port 0: what callers see when handlers succeed, refuse, fail, hang and drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import FrameType
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bottega import errors
from bottega.rpc import logs, refusals
from bottega.rpc.boundary import REQUEST_ID_KEY
from bottega.rpc.channel import open_channel
from bottega.rpc.fleet import FleetMembership
from bottega.rpc.server import Server, ServerConfig
from bottega.rpc.status import from_rpc_error
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, image_pb2, image_pb2_grpc

NAME = image_pb2.DESCRIPTOR.services_by_name["ImageService"].full_name
_REFUSED = fleet_pb2.JoinRequest(registration=fleet_pb2.Registration(name="refuse")).SerializeToString()


class Scripted(image_pb2_grpc.ImageServiceServicer):
    """Does what the request's id says."""

    def __init__(self) -> None:
        self.seen_request_id = ""
        self.stream_ended = asyncio.Event()
        self.release = asyncio.Event()

    async def GetJob(self, request: image_pb2.GetJobRequest, context: object) -> image_pb2.GetJobResponse:
        self.seen_request_id = logs.bound().get("request_id", "")
        match request.job_id:
            case "refuse":
                raise errors.JobNotFound("no such job", metadata={"job_id": "refuse"})
            case "break":
                raise ZeroDivisionError("secret text of a library")
            case "hang":
                await asyncio.sleep(60)
            case "wait":
                await self.release.wait()
        return image_pb2.GetJobResponse()

    async def WatchJob(
        self, request: image_pb2.WatchJobRequest, context: object
    ) -> AsyncIterator[image_pb2.WatchJobResponse]:
        try:
            yield image_pb2.WatchJobResponse()
            if request.job_id == "refuse":
                raise errors.JobNotFound("no such job")
            await asyncio.sleep(60)
        finally:
            self.stream_ended.set()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Server, Scripted, grpc.aio.Channel]]:
    server = Server("scripted", ServerConfig(default_deadline_s=0.3, drain_grace_s=2.0))
    servicer = Scripted()  # type: ignore[abstract]
    image_pb2_grpc.add_ImageServiceServicer_to_server(servicer, server.grpc)
    server.add_services([NAME])
    await server.start()
    channel = open_channel(server.address)
    yield server, servicer, channel
    await channel.close()
    await server.stop()


Served = tuple[Server, Scripted, grpc.aio.Channel]


def _stub(channel: grpc.aio.Channel) -> image_pb2_grpc.ImageServiceAsyncStub:
    return image_pb2_grpc.ImageServiceStub(channel)


async def _failure(channel: grpc.aio.Channel, job_id: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _stub(channel).GetJob(image_pb2.GetJobRequest(job_id=job_id))
    return caught.value


async def test_a_refusal_reaches_the_caller_typed(served: Served) -> None:
    error = from_rpc_error(await _failure(served[2], "refuse"))
    assert type(error) is errors.JobNotFound
    assert error.metadata == {"job_id": "refuse"}


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x02\xc3\x28"], ids=["no message", "no UTF-8"])
@pytest.mark.parametrize("method", ["GetJob", "WatchJob"])
async def test_bytes_that_are_no_request_are_refused_like_any_wrong_request(
    served: Served, method: str, raw: bytes
) -> None:
    failure = await _failure_of_bytes(served[2], f"/{NAME}/{method}", raw)
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert type(from_rpc_error(failure)) is errors.InvalidRequest
    assert "DecodeError" not in str(failure.details())


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


async def _failure_of_bytes(channel: grpc.aio.Channel, method: str, raw: bytes) -> grpc.aio.AioRpcError:
    call: Any = channel.unary_stream(method)  # which reads a single answer as well
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [answer async for answer in call(raw)]
    return caught.value


async def test_an_unexpected_fault_is_a_plain_internal_and_logged_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    failure = await _failure(served[2], "break")
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(failure.details()) + str(failure.trailing_metadata())
    assert type(from_rpc_error(failure)) is errors.InternalError
    faults = [record for record in caplog.records if record.exc_info and "secret" in str(record.exc_info[1])]
    assert len(faults) == 1
    assert faults[0].levelno == logging.ERROR


async def test_a_crowd_that_is_refused_is_a_few_lines_in_the_log_and_its_number(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    crowd = 60
    await asyncio.gather(*(_refused(served[2], f"caller-{number}") for number in range(crowd)))
    with pytest.raises(grpc.aio.AioRpcError):  # another kind, which the crowd does not hide
        _ = [answer async for answer in _stub(served[2]).WatchJob(image_pb2.WatchJobRequest(job_id="refuse"))]
    assert [line.__dict__["method"] for line in _told(caplog, "call refused")][-1] == f"/{NAME}/WatchJob"
    await _until(lambda: _refusals(caplog) == crowd + 1)
    lines = _told(caplog, "call refused"), _told(caplog, "more calls refused")
    # In at most three of the seconds that the log counts by.
    assert len(lines[0]) <= 3 * refusals.TOLD_PER_SECOND + 1
    assert 1 <= len(lines[1]) <= 3
    for line in lines[1]:
        assert (line.__dict__["method"], line.__dict__["reason"]) == (f"/{NAME}/GetJob", "JOB_NOT_FOUND")


async def test_the_number_of_refusals_carries_the_fields_of_no_caller(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    bound: dict[str, set[str]] = {}

    def note(record: logging.LogRecord) -> bool:
        bound.setdefault(record.getMessage(), set()).update(logs.bound().values())
        return True

    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(note)
    try:
        await asyncio.gather(*(_refused(served[2], "caller") for _ in range(30)))
        await _until(lambda: "more calls refused" in bound)
    finally:
        caplog.handler.removeFilter(note)
    assert (bound["call refused"], bound["more calls refused"]) == ({"caller"}, set())


async def test_a_server_that_stops_says_first_how_many_more_it_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with _small_server() as (_, _, channel):
        await asyncio.gather(*(_refused(channel, "caller") for _ in range(20)))
    assert _refusals(caplog) == 20


async def _refused(channel: grpc.aio.Channel, request_id: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await _stub(channel).GetJob(image_pb2.GetJobRequest(job_id="refuse"), metadata=((REQUEST_ID_KEY, request_id),))


def _told(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [line for line in caplog.records if line.message == event]


def _refusals(caplog: pytest.LogCaptureFixture) -> int:
    """Of which the log knows."""
    return len(_told(caplog, "call refused")) + sum(
        int(line.__dict__["calls"]) for line in _told(caplog, "more calls refused")
    )


@contextlib.asynccontextmanager
async def _small_server(**config: Any) -> AsyncIterator[Served]:
    server, servicer = Server("small", ServerConfig(**config)), Scripted()  # type: ignore[abstract]
    image_pb2_grpc.add_ImageServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    async with open_channel(server.address) as channel:
        yield server, servicer, channel
    await server.stop()


async def test_one_call_too_many_hears_when_to_come_back_and_the_others_end() -> None:
    async with _small_server(max_calls=2) as (_, servicer, channel):
        calls = [_stub(channel).GetJob(image_pb2.GetJobRequest(job_id="wait")) for _ in range(2)]
        await asyncio.sleep(0.1)
        refused = from_rpc_error(await _failure(channel, "one more"))
        assert type(refused) is errors.QueueFull
        assert refused.metadata == {"limit": "max_calls"}
        assert refused.retry_after_s
        servicer.release.set()
        await asyncio.gather(*calls)
        await _stub(channel).GetJob(image_pb2.GetJobRequest())


async def test_requests_that_do_not_come_hold_up_others_only_for_a_moment() -> None:
    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    async with _small_server(max_message_mib=1, max_requests_mib=2) as (_, _, channel):
        method: Any = channel.stream_unary("/bottega.v1.ImageService/GetJob")
        silent = [asyncio.ensure_future(method(never())) for _ in range(3)]
        await asyncio.sleep(0.1)
        await asyncio.wait_for(_stub(channel).GetJob(image_pb2.GetJobRequest()), 2.9)
        # Two have taken the room, whichever they are; nobody waits behind the third.
        slow, _ = await asyncio.wait(silent, return_when=asyncio.FIRST_COMPLETED)
        for call in silent:
            call.cancel()
        for call in slow:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                call.result()
            assert type(from_rpc_error(refusal.value)) is errors.QueueFull


async def test_a_request_is_given_up_for_as_soon_as_it_is_answered_by_a_stream() -> None:
    async with _small_server(max_message_mib=1, max_requests_mib=1) as (_, _, channel):
        watches = [_stub(channel).WatchJob(image_pb2.WatchJobRequest(job_id="x" * (900 << 10))) for _ in range(3)]
        for watch in watches:
            await asyncio.wait_for(anext(aiter(watch)), 1)
        for watch in watches:
            watch.cancel()


async def _refused_in_mid_stream(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        _ = [answer async for answer in _stub(channel).WatchJob(image_pb2.WatchJobRequest(job_id="refuse"))]


async def _left_by_its_caller(channel: grpc.aio.Channel) -> None:
    call = _stub(channel).WatchJob(image_pb2.WatchJobRequest(job_id="long"))
    await call.read()
    call.cancel()


ENDS: dict[str, Callable[[grpc.aio.Channel], Awaitable[object]]] = {
    "well": lambda channel: _stub(channel).GetJob(image_pb2.GetJobRequest()),
    "refused": lambda channel: _failure(channel, "refuse"),
    "too late": lambda channel: _failure(channel, "hang"),
    "no message": lambda channel: _failure_of_bytes(channel, f"/{NAME}/GetJob", b"\xff\xff\xff"),
    "no message for a stream": lambda channel: _failure_of_bytes(channel, f"/{NAME}/WatchJob", b"\xff\xff\xff"),
    "refused in mid-stream": _refused_in_mid_stream,
    "left by its caller": _left_by_its_caller,
}


@pytest.mark.parametrize("end", ENDS)
async def test_of_a_call_that_has_ended_nothing_waits_for_the_collector(served: Served, end: str) -> None:
    with _collector_off():
        await ENDS[end](served[2])
        await _until_nothing_is_kept()


@pytest.mark.parametrize("last", [b"\xff\xff\xff", _REFUSED], ids=["no message", "refused before all was read"])
async def test_of_a_stream_of_requests_that_was_refused_nothing_waits_for_the_collector(last: bytes) -> None:
    server, _ = await _fleet("127.0.0.1:0")
    try:
        async with open_channel(server.address) as channel:
            join: Any = channel.stream_stream("/bottega.v1.FleetService/Join")
            with _collector_off():
                with pytest.raises(grpc.aio.AioRpcError):
                    _ = [answer async for answer in join(iter([b"", last, b"", b""]))]
                await _until_nothing_is_kept()
    finally:
        await server.stop()


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """What waits for it is kept."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _until_nothing_is_kept() -> None:
    """Of any call that was served; what it was asked is in its frames, and those are in its context's hands."""
    async with asyncio.timeout(2):
        await _until(lambda: not _kept())


def _kept() -> list[object]:
    # By type: isinstance asks objects of other libraries for their class, which some answer with a warning.
    kept = gc.get_objects()
    contexts = [one for one in kept if type(one).__name__ == "_ServicerContext"]
    return [*contexts, *(one for one in kept if type(one) is FrameType and "request" in one.f_locals)]


async def test_a_unary_call_without_a_deadline_gets_the_default(served: Served) -> None:
    failure = await asyncio.wait_for(_failure(served[2], "hang"), 5)
    assert type(from_rpc_error(failure)) is errors.DeadlinePassed


async def test_a_refusal_in_mid_stream_is_typed(served: Served) -> None:
    call = _stub(served[2]).WatchJob(image_pb2.WatchJobRequest(job_id="refuse"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in call]
    assert type(from_rpc_error(caught.value)) is errors.JobNotFound


async def test_a_stream_whose_caller_goes_is_closed(served: Served) -> None:
    _, servicer, channel = served
    call = _stub(channel).WatchJob(image_pb2.WatchJobRequest(job_id="long"))
    await call.read()
    call.cancel()
    await asyncio.wait_for(servicer.stream_ended.wait(), 5)


async def test_the_callers_request_id_is_bound_to_the_logs(served: Served) -> None:
    _, servicer, channel = served
    await _stub(channel).GetJob(image_pb2.GetJobRequest(), metadata=((REQUEST_ID_KEY, "order-7"),))
    assert servicer.seen_request_id == "order-7"
    await _stub(channel).GetJob(image_pb2.GetJobRequest())
    assert servicer.seen_request_id == ""


async def test_health_is_down_until_serving(served: Served) -> None:
    server, _, channel = served
    check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
    requests = [health_pb2.HealthCheckRequest(service=service) for service in ("", NAME)]
    for request in requests:
        assert (await check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.set_serving(True)
    for request in requests:
        assert (await check(request)).status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_the_service(served: Served) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(served[2])  # type: ignore[arg-type]
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = [s.name async for answer in call for s in answer.list_services_response.service]
    assert NAME in names


async def test_metrics_count_calls_by_outcome(served: Served) -> None:
    server, _, channel = served
    await _failure(channel, "refuse")
    url = f"http://{server.metrics_address}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    assert f'bottega_rpc_calls_total{{code="NOT_FOUND",method="/{NAME}/GetJob"}} 1.0' in text


async def test_drain_lets_a_running_call_end_and_is_not_held_up_by_health_watchers(served: Served) -> None:
    server, servicer, channel = served
    await server.set_serving(True)
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
    await watch.read()
    running = asyncio.ensure_future(_stub(channel).GetJob(image_pb2.GetJobRequest(job_id="wait"), timeout=10))
    await asyncio.sleep(0.1)
    draining = asyncio.create_task(server.drain())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    servicer.release.set()
    assert await running == image_pb2.GetJobResponse()
    await asyncio.wait_for(draining, 1.5)
    watch.cancel()


async def test_a_second_instance_on_the_same_port_refuses_to_start(served: Served) -> None:
    second = Server("second", ServerConfig(listen=served[0].address))
    with pytest.raises(errors.Unavailable, match="another instance"):
        await second.start()
    await second.stop()


class ScriptedFleet(fleet_pb2_grpc.FleetServiceServicer):
    def __init__(self) -> None:
        self.reports: asyncio.Queue[fleet_pb2.JoinRequest] = asyncio.Queue()

    async def Join(
        self, requests: AsyncIterator[fleet_pb2.JoinRequest], context: object
    ) -> AsyncIterator[fleet_pb2.JoinResponse]:
        yield fleet_pb2.JoinResponse(backlog=3)
        async for request in requests:
            if request.registration.name == "refuse":
                raise errors.InvalidRequest("no such member")
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


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)


SERVICE = """
import asyncio
from bottega.rpc.server import Server, ServerConfig, run
async def nothing(): pass
async def main():
    server = Server("tiny", ServerConfig(drain_grace_s=1.0))
    await run(server, warm_up=nothing, shut_down=nothing)
asyncio.run(main())
"""


async def test_a_service_says_in_json_that_it_serves_and_ends_on_sigterm() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVICE, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    line = json.loads(await asyncio.wait_for(process.stderr.readline(), 20))
    assert line["event"] == "serving"
    assert line["service"] == "tiny"
    assert line["address"].startswith("127.0.0.1:")
    os.kill(process.pid, signal.SIGTERM)
    rest = (await asyncio.wait_for(process.stderr.read(), 10)).decode().splitlines()
    assert await process.wait() == 0
    assert json.loads(rest[-1])["event"] == "stopped"
