"""A real server whose callers do not read: it waits for them so long, holds so much for them, and serves the others."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from bottega import errors
from bottega.rpc.interceptor import call_limits
from bottega.rpc.status import from_rpc_error
from bottega.v1 import image_pb2
from tests.fakes.scripted_images import NAME, narrow_channel, scripted_images, stub, until
from tests.support.waiting import eventually


def ask(channel: grpc.aio.Channel, method: str, job_id: str) -> Any:
    """A call of any method that reads nothing unless it is told to."""
    call: Any = channel.unary_stream(f"/{NAME}/{method}")
    return call(image_pb2.GetJobRequest(job_id=job_id).SerializeToString())  # WatchJob's request has the same field


async def _until_there_is_a_place(channel: grpc.aio.Channel) -> list[type[errors.BottegaError]]:
    """Ask for streams that their handler refuses, until one finds a place. Return what each ended with."""
    ends = []
    async with asyncio.timeout(60):
        while True:
            ends.append(type(await _end_of(ask(channel, "WatchJob", "refuse"))))
            if ends[-1] is errors.JobNotFound:
                return ends
            await asyncio.sleep(0.02)


async def _end_of(call: Any) -> errors.BottegaError:
    """Read a call that has been read before, or has not, to its end."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("it ended well")


@pytest.mark.parametrize("size", ["small", "large"])
async def test_who_does_not_read_gives_its_place_to_others_and_hears_why_when_it_reads(size: str) -> None:
    async with (
        scripted_images(max_streams=2, peer_share=1.0, answer_wait_s=1.5) as (server, _, channel),
        narrow_channel(server.address) as narrow,
    ):
        stalled = [ask(narrow, "WatchJob", size) for _ in range(2)]
        for call in stalled:
            await call.read()  # it has a place
        await _until_there_is_a_place(channel)
        assert not any(call.done() for call in stalled)
        for call in stalled:
            assert type(await asyncio.wait_for(_end_of(call), 30)) is errors.ReaderStalled


async def test_who_reads_may_wait_for_news_as_long_as_there_is_none() -> None:
    async with scripted_images(answer_wait_s=0.1) as (_, servicer, channel):
        call = stub(channel).WatchJob(image_pb2.WatchJobRequest(job_id="wait"))
        assert await call.read() is not grpc.aio.EOF
        asyncio.get_running_loop().call_later(0.5, servicer.release.set)
        assert await asyncio.wait_for(call.read(), 30) is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_who_does_not_read_is_waited_for_less_when_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "_CONTENDED_S", 0.3)
    async with (
        scripted_images(max_streams=1, answer_wait_s=600) as (server, _, channel),
        narrow_channel(server.address) as narrow,
    ):
        stalled = ask(narrow, "WatchJob", "small")
        await stalled.read()  # it has the place
        assert (await _until_there_is_a_place(channel))[0] is errors.QueueFull
        stalled.cancel()


async def test_large_answers_that_nobody_reads_leave_no_room_for_others_and_give_it_back() -> None:
    async with (
        scripted_images(max_answers_mib=2, answer_wait_s=0.2) as (server, servicer, channel),
        narrow_channel(server.address) as narrow,
    ):
        streams = ask(narrow, "WatchJob", "large")
        unary = ask(narrow, "GetJob", "large")
        await eventually(lambda: servicer.large_answers == {"GetJob", "WatchJob"})
        await asyncio.sleep(0.5)  # the stream has been ended by now, and what it had is still held
        refused = await until(channel, refused=True, job_id="large")
        assert refused is not None
        assert refused.metadata == {"limit": "max_answers_mib"}
        assert refused.retry_after_s
        await stub(channel).GetJob(image_pb2.GetJobRequest())  # a small one has room
        for call in (streams, unary):
            call.cancel()
        await until(channel, refused=False, job_id="large")


async def test_an_answer_above_the_whole_budget_goes_where_no_other_waits() -> None:
    async with scripted_images(max_answers_mib=1) as (_, _, channel):
        await stub(channel).GetJob(image_pb2.GetJobRequest(job_id="huge"))
