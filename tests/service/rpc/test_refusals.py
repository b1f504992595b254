"""What a real server refuses: calls beyond its bounds, and what the log says of a crowd."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import urllib.request
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from bottega import errors
from bottega.rpc.channel import open_channel
from bottega.rpc.status import from_rpc_error
from bottega.v1 import image_pb2
from tests.fakes.scripted_images import NAME, Served, scripted_images, stub


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with scripted_images(default_deadline_s=0.3, drain_grace_s=2.0) as service:
        yield service


async def test_refusals_and_faults_of_a_crowd_are_a_few_lines_and_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    fault, crowd = "a call failed with an unexpected error", 60
    async with scripted_images() as (_, _, channel):
        await asyncio.gather(*(_refused(channel, job_id) for job_id in ("refuse", "break") for _ in range(crowd)))
    for told, more in (("call refused", "more calls were refused"), (fault, f"more times: {fault}")):
        assert len(_told(caplog, told)) < crowd / 2
        assert len(_told(caplog, told)) + _counted(_told(caplog, more)) == crowd, "a server that stops says the rest"
    assert all(line.exc_info and line.levelno == logging.ERROR for line in _told(caplog, fault))
    for line in _told(caplog, "more calls were refused"):
        assert (line.__dict__["method"], line.__dict__["reason"]) == (f"/{NAME}/GetJob", "JOB_NOT_FOUND")


async def test_who_leaves_in_the_middle_of_asking_for_metrics_leaves_no_traceback(
    served: Served, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    host, port = served[0].metrics_address.split(":")

    def ask() -> None:
        with socket.create_connection((host, int(port)), timeout=5) as caller:
            caller.sendall(b"GET /metr")
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it resets, when it goes

    for _ in range(30):
        await asyncio.to_thread(ask)
    with await asyncio.to_thread(urllib.request.urlopen, f"http://{host}:{port}/metrics", timeout=10) as answer:
        assert answer.status == 200
    assert [line for line in caplog.records if line.levelno >= logging.INFO and line.name != "bottega.rpc.server"] == []
    assert "Traceback" not in capfd.readouterr().err


async def _refused(channel: grpc.aio.Channel, job_id: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await stub(channel).GetJob(image_pb2.GetJobRequest(job_id=job_id))


def _told(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [line for line in caplog.records if line.message == event]


def _counted(lines: Sequence[logging.LogRecord]) -> int:
    return sum(int(line.__dict__["calls"]) for line in lines)


async def test_each_of_a_crowd_that_comes_at_once_is_told_why_it_is_refused() -> None:
    crowd = 1_500  # gRPC itself would cut off what is beyond a thousand, as if somebody had cancelled it
    async with (
        scripted_images(max_calls=1024, max_streams=1, peer_share=1.0) as (server, _, channel),
        open_channel(server.address) as beside,  # each connection has 640 calls at most
        open_channel(server.address) as third,
    ):
        request = image_pb2.WatchJobRequest(job_id="wait")
        watches = [stub(each).WatchJob(request) for each in (channel, beside, third) for _ in range(crowd // 3)]
        firsts = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
        refused = [from_rpc_error(first) for first in firsts if isinstance(first, grpc.aio.AioRpcError)]
        assert len(refused) == crowd - 1
        assert {(type(error), error.metadata.get("limit")) for error in refused} == {(errors.QueueFull, "max_streams")}
        for watch in watches:
            watch.cancel()


async def test_requests_that_do_not_come_hold_up_others_only_for_a_moment() -> None:
    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    async with scripted_images(max_message_mib=1, max_requests_mib=2) as (_, _, channel):
        method: Any = channel.stream_unary("/bottega.v1.ImageService/GetJob")
        silent = [asyncio.ensure_future(method(never())) for _ in range(3)]
        await asyncio.sleep(0.1)
        await asyncio.wait_for(stub(channel).GetJob(image_pb2.GetJobRequest()), 30)
        # Two have taken the room, whichever they are; nobody waits behind the third.
        slow, _ = await asyncio.wait(silent, return_when=asyncio.FIRST_COMPLETED)
        for call in silent:
            call.cancel()
        for call in slow:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                call.result()
            assert type(from_rpc_error(refusal.value)) is errors.QueueFull


async def test_a_request_is_given_up_for_as_soon_as_it_is_answered_by_a_stream() -> None:
    async with scripted_images(max_message_mib=1, max_requests_mib=1) as (_, _, channel):
        watches = [stub(channel).WatchJob(image_pb2.WatchJobRequest(job_id="x" * (900 << 10))) for _ in range(3)]
        for watch in watches:
            await asyncio.wait_for(anext(aiter(watch)), 20)
        for watch in watches:
            watch.cancel()
