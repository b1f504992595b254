"""A real server on port 0: what callers see when handlers succeed, refuse, fail, hang and drain."""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bottega import errors
from bottega.rpc.interceptor.calls import REQUEST_ID_KEY
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from bottega.rpc.status import from_rpc_error
from bottega.v1 import image_pb2
from tests.fakes.scripted_images import NAME, Served, failure, scripted_images, stub
from tests.support.waiting import eventually


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with scripted_images(default_deadline_s=0.3, drain_grace_s=2.0) as service:
        yield service


async def test_a_refusal_reaches_the_caller_typed(served: Served) -> None:
    error = from_rpc_error(await failure(served[2], "refuse"))
    assert type(error) is errors.JobNotFound
    assert error.metadata == {"job_id": "refuse"}


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x02\xc3\x28"], ids=["no message", "no UTF-8"])
@pytest.mark.parametrize("method", ["GetJob", "WatchJob"])
async def test_bytes_that_are_no_request_are_refused_like_any_wrong_request(
    served: Served, method: str, raw: bytes
) -> None:
    failed = await _failure_of_bytes(served[2], f"/{NAME}/{method}", raw)
    assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert type(from_rpc_error(failed)) is errors.InvalidRequest
    assert "DecodeError" not in str(failed.details())


async def test_a_message_beyond_the_limit_is_refused_in_our_words() -> None:
    async with scripted_images(max_message_mib=1, max_requests_mib=1) as (_, _, channel):
        for method in ("GetJob", "WatchJob"):
            failed = await _failure_of_bytes(channel, f"/{NAME}/{method}", bytes((1 << 20) + 1))
            refused = from_rpc_error(failed)
            assert type(refused) is errors.TooLarge
            assert (refused.message, refused.metadata) == (failed.details(), {"limit": "message", "bytes": "1048576"})


@pytest.mark.parametrize("method", [f"/{NAME}/Paint", "/nobody/GetJob", "/grpc.health.v1.Health/Paint", "GetJob"])
async def test_a_method_that_nobody_has_is_refused_in_our_words_and_is_not_remembered(
    served: Served, method: str
) -> None:
    failed = await _failure_of_bytes(served[2], method, b"")
    assert failed.code() is grpc.StatusCode.UNIMPLEMENTED
    assert type(from_rpc_error(failed)) is errors.MethodNotServed
    assert from_rpc_error(failed).message == failed.details()
    url = f"http://{served[0].metrics_address}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    assert "Paint" not in text
    assert 'bottega_rpc_calls_total{code="UNIMPLEMENTED",method="unknown"} 1.0' in text


async def _failure_of_bytes(channel: grpc.aio.Channel, method: str, raw: bytes) -> grpc.aio.AioRpcError:
    call: Any = channel.unary_stream(method)  # which reads a single answer as well
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [answer async for answer in call(raw)]
    return caught.value


async def test_an_unexpected_fault_is_a_plain_internal_and_logged_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    failed = await failure(served[2], "break")
    assert failed.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(failed.details()) + str(failed.trailing_metadata())
    assert type(from_rpc_error(failed)) is errors.InternalError
    faults = [record for record in caplog.records if record.exc_info and "secret" in str(record.exc_info[1])]
    assert len(faults) == 1
    assert faults[0].levelno == logging.ERROR


async def test_a_service_without_descriptors_says_so_whatever_it_was_doing(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    error = from_rpc_error(await failure(served[2], "no descriptor"))
    assert type(error) is errors.TooManyOpenFiles
    assert "LimitNOFILE" in error.message
    assert [line.__dict__["reason"] for line in caplog.records if line.message == "call refused"] == [error.reason_name]


async def test_a_unary_call_without_a_deadline_gets_the_default(served: Served) -> None:
    failed = await asyncio.wait_for(failure(served[2], "hang"), 30)
    assert type(from_rpc_error(failed)) is errors.DeadlinePassed


async def test_a_refusal_in_mid_stream_is_typed(served: Served) -> None:
    call = stub(served[2]).WatchJob(image_pb2.WatchJobRequest(job_id="refuse"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in call]
    assert type(from_rpc_error(caught.value)) is errors.JobNotFound


async def test_a_stream_whose_caller_goes_is_closed(served: Served) -> None:
    _, servicer, channel = served
    call = stub(channel).WatchJob(image_pb2.WatchJobRequest(job_id="long"))
    await call.read()
    call.cancel()
    await asyncio.wait_for(servicer.stream_ended.wait(), 30)


async def test_the_callers_request_id_is_bound_to_the_logs(served: Served) -> None:
    _, servicer, channel = served
    await stub(channel).GetJob(image_pb2.GetJobRequest(), metadata=((REQUEST_ID_KEY, "order-7"),))
    assert servicer.seen_request_id == "order-7"
    await stub(channel).GetJob(image_pb2.GetJobRequest())
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


async def test_drain_lets_a_running_call_end_and_is_not_held_up_by_health_watchers() -> None:
    async with scripted_images(drain_grace_s=600.0) as (server, servicer, channel):
        await server.set_serving(True)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
        await watch.read()
        running = asyncio.ensure_future(stub(channel).GetJob(image_pb2.GetJobRequest(job_id="wait"), timeout=60))
        await eventually(lambda: servicer.waiting > 0)
        draining = asyncio.create_task(server.drain())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        servicer.release.set()
        assert await running == image_pb2.GetJobResponse()
        await asyncio.wait_for(draining, 60)
        watch.cancel()


async def test_a_server_that_drains_never_says_again_that_it_serves(served: Served) -> None:
    server, _, channel = served
    await server.set_serving(True)
    seen = []

    async def finish() -> None:
        await server.set_serving(True)  # as a task does that keeps health as the disk is
        health = health_pb2_grpc.HealthStub(channel)
        seen.append((await health.Check(health_pb2.HealthCheckRequest(), timeout=5)).status)  # type: ignore[attr-defined]

    await server.drain(finish)
    assert seen == [health_pb2.HealthCheckResponse.NOT_SERVING]


async def test_a_second_instance_on_the_same_port_refuses_to_start(served: Served) -> None:
    second = Server("second", ServerConfig(listen=served[0].address))
    with pytest.raises(errors.Unavailable, match="another instance"):
        await second.start()
    await second.stop()
