"""Connections on which nobody says anything for ten minutes: they live, and one whose peer vanished is still noticed.

With the options of our own channels and servers, over a cable that counts how often somebody connected.
"""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from bottega.rpc.channel import open_channel
from bottega.v1 import image_pb2
from tests.fakes.scripted_images import scripted_images, stub
from tests.support.cut_cable import laid

QUIET_S = 600.0
# A ping every 30 s and 10 s for its answer (rpc.channel), and as much again for a machine that has other things to do.
NOTICED_S = 80.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(QUIET_S + NOTICED_S + 120)]


async def test_a_stream_without_news_lives_for_ten_minutes_and_a_peer_that_vanishes_then_is_noticed() -> None:
    async with scripted_images() as (server, servicer, _), laid(server.address) as cable:
        async with open_channel(cable.address) as channel:
            call = stub(channel).WatchJob(image_pb2.WatchJobRequest(job_id="wait"))
            await call.read()
            assert not await _ended_early(call)
            cable.go_dead()
            began = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read(), NOTICED_S)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - began > 1  # it was the ping that nobody answered
        assert cable.carried == 1
        servicer.release.set()


async def _ended_early(call: grpc.aio.UnaryStreamCall[image_pb2.WatchJobRequest, image_pb2.WatchJobResponse]) -> bool:
    reading = asyncio.create_task(call.wait_for_connection())
    await reading
    try:
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(call.code())), QUIET_S)
    except TimeoutError:
        return False
    return True
