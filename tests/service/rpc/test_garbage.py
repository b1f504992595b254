"""A real server leaves nothing of a call that has ended to the collector, which looks seldom, however it has ended."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import grpc
import pytest

from bottega.v1 import fleet_pb2, image_pb2
from tests.fakes.scripted_images import NAME, failure, scripted_images, stub
from tests.support.waiting import eventually

_REFUSED = fleet_pb2.JoinRequest(registration=fleet_pb2.Registration(name="refuse")).SerializeToString()


async def _no_message(channel: grpc.aio.Channel, method: str) -> None:
    call: Any = channel.unary_stream(f"/{NAME}/{method}")  # which reads a single answer as well
    with pytest.raises(grpc.aio.AioRpcError):
        _ = [answer async for answer in call(b"\xff\xff\xff")]


async def _refused_in_mid_stream(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        _ = [answer async for answer in stub(channel).WatchJob(image_pb2.WatchJobRequest(job_id="refuse"))]


async def _left_by_its_caller(channel: grpc.aio.Channel) -> None:
    call = stub(channel).WatchJob(image_pb2.WatchJobRequest(job_id="long"))
    await call.read()
    call.cancel()


ENDS: dict[str, Callable[[grpc.aio.Channel], Awaitable[object]]] = {
    "well": lambda channel: stub(channel).GetJob(image_pb2.GetJobRequest()),
    "refused": lambda channel: failure(channel, "refuse"),
    "too late": lambda channel: failure(channel, "hang"),
    "no message": lambda channel: _no_message(channel, "GetJob"),
    "no message for a stream": lambda channel: _no_message(channel, "WatchJob"),
    "refused in mid-stream": _refused_in_mid_stream,
    "left by its caller": _left_by_its_caller,
}


@pytest.mark.parametrize("end", ENDS)
async def test_of_a_call_that_has_ended_nothing_waits_for_the_collector(end: str) -> None:
    async with scripted_images(default_deadline_s=0.3) as (_, _, channel):
        with _collector_off() as kept:
            await ENDS[end](channel)
            await eventually(lambda: not kept())


@pytest.mark.parametrize("last", [b"\xff\xff\xff", _REFUSED], ids=["no message", "refused before all was read"])
async def test_of_a_stream_of_requests_that_was_refused_nothing_waits_for_the_collector(last: bytes) -> None:
    async with scripted_images() as (_, _, channel):
        join: Any = channel.stream_stream("/bottega.v1.FleetService/Join")
        with _collector_off() as kept:
            with pytest.raises(grpc.aio.AioRpcError):
                _ = [answer async for answer in join(iter([b"", last, b"", b""]))]
            await eventually(lambda: not kept())


@contextmanager
def _collector_off() -> Iterator[Callable[[], list[object]]]:
    """What waits for it is kept. Yields a function that lists what is kept of calls made since."""
    gc.collect()
    gc.disable()
    before = _kept()
    try:
        yield lambda: [one for one in _kept() if not any(one is each for each in before)]
    finally:
        gc.enable()


def _kept() -> list[object]:
    """Of any call that was served: no context should be, and no frame that has its request."""
    # By type: isinstance asks objects of other libraries for their class, which some answer with a warning.
    kept = gc.get_objects()
    contexts = [one for one in kept if type(one).__name__ == "_ServicerContext"]
    return [*contexts, *(one for one in kept if type(one) is FrameType and "request" in one.f_locals)]
