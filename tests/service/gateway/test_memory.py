"""What large images cost a gateway: it works in memory that it keeps, and in no more however many come at once."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from PIL import Image

from bottega import kinds
from bottega.client import AsyncClient
from bottega.errors import BadImage, BottegaError, DeadlinePassed, QueueFull, TooLarge
from bottega.rpc.channel import open_channel
from bottega.rpc.status import from_rpc_error
from bottega.v1 import fleet_pb2, image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from tests.fakes.scripted_images import NAME, narrow_channel
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.services import FREE_PORTS, Services, gateway_config
from tests.support.waiting import eventually

ORDERS = 6
CALLERS = 12
REQUESTS_MIB = 32
# Without that bound, 64 callers took 3.4 GiB, and 12 a fifth of it.
MOST_GROWTH_BYTES = 6 * REQUESTS_MIB << 20
READERS = 100
ANSWERS_MIB = 8
# Four times that, and a third of a MiB for each caller that does not read. Without the bounds, 100 unread calls took
# 460 MiB (WatchJob) and 125 MiB (GetImage).
MOST_UNREAD_BYTES = (4 * ANSWERS_MIB << 20) + READERS * (1 << 20) // 3
JOINING = 40
# Without the bound 40 of them took a GiB, and 64 2.6 GiB.
MOST_STRANGE_BYTES = 4 * 128 << 20
# At rest, of that.
MOST_LEFT_BYTES = 32 << 20


def _large_png() -> bytes:
    """8 MiB of noise."""
    pixels = np.random.default_rng(1).integers(0, 256, (1660, 1660, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    return out.getvalue()


def _page_faults(pid: int) -> int:
    """Pages that the process was given so far without reading a disk (proc(5), minflt)."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[7])


async def test_a_large_image_is_handled_in_memory_that_the_one_before_left(tmp_path: Path) -> None:
    image, faults = _large_png(), []
    spec = GenerationSpec(prompt="a star", num_inference_steps=4, image=image, strength=1.0)
    with Services(tmp_path) as services:
        gateway = services.start("gateway", gateway_config())
        worker = await ScriptedWorker("w1", gateway.fleet).start()
        async with open_channel(gateway.address) as channel:
            images: image_pb2_grpc.ImageServiceAsyncStub = image_pb2_grpc.ImageServiceStub(channel)
            for _ in range(ORDERS):
                before = _page_faults(gateway.process.pid)
                events = [answer.event async for answer in images.Generate(image_pb2.GenerateRequest(spec=spec))]
                assert events[-1].HasField("completed")
                faults.append(_page_faults(gateway.process.pid) - before)
        await worker.die()
    # The image itself has 2000 pages, and some ten copies of it are made on its way.
    assert statistics.median(faults[ORDERS // 2 :]) < 6000, faults


@contextlib.asynccontextmanager
async def _most_memory(pid: int, seen: list[int]) -> AsyncIterator[None]:
    """Appends the resident bytes of a process before the block, and the most within it."""
    process = psutil.Process(pid)
    seen.extend([process.memory_info().rss] * 2)

    async def look() -> None:
        while True:
            seen[-1] = max(seen[-1], process.memory_info().rss)
            await asyncio.sleep(0.01)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def test_many_large_requests_take_bounded_memory_which_is_given_back_and_the_others_hear_when_to_come_back(
    tmp_path: Path,
) -> None:
    noise = os.urandom(8 << 20)
    # The image is decoded; the mask is none.
    spec = GenerationSpec(prompt="a star", image=_large_png(), mask_image=noise, strength=0.5)
    raw = image_pb2.SubmitJobRequest(spec=spec).SerializeToString()
    small = GenerationSpec(prompt="a star", image=b"none", mask_image=b"none", strength=0.5)

    async def refused(channel: grpc.aio.Channel, raw: bytes) -> BottegaError:
        submit: Any = channel.unary_unary("/bottega.v1.ImageService/SubmitJob")
        try:
            await submit(raw, timeout=60)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        raise AssertionError("noise is no image")

    memory: list[int] = []
    with Services(tmp_path) as services:
        server = {**FREE_PORTS, "max_requests_mib": REQUESTS_MIB}
        gateway = services.start("gateway", gateway_config(codec_processes=1, server=server))
        async with AsyncExitStack() as stack:  # gRPC keeps some MiB for a connection that has carried much
            channels = [await stack.enter_async_context(open_channel(gateway.address)) for _ in range(CALLERS)]
            await refused(channels[0], image_pb2.SubmitJobRequest(spec=small).SerializeToString())
            process = psutil.Process(gateway.process.pid)
            decoders = process.children(recursive=True)
            assert decoders, "the first image started a process that decodes"
            async with _most_memory(gateway.process.pid, memory):
                for decoder in decoders:  # however fast the machine is, some callers must wait for memory
                    decoder.suspend()
                calls = [asyncio.create_task(refused(channel, raw)) for channel in channels]
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                for decoder in decoders:
                    decoder.resume()
                errors = await asyncio.gather(*calls)
        await eventually(lambda: process.memory_info().rss <= memory[0] + MOST_LEFT_BYTES, "memory to be given back")
    assert memory[1] - memory[0] < MOST_GROWTH_BYTES
    assert {type(error) for error in errors} == {BadImage, QueueFull}
    full = [error for error in errors if type(error) is QueueFull]
    assert all(error.retry_after_s and error.metadata == {"limit": "max_requests_mib"} for error in full)


@pytest.mark.alone  # memory without a bound has half a second to show
@pytest.mark.parametrize("method", ["WatchJob", pytest.param("GetImage", marks=pytest.mark.slow)])
async def test_many_callers_that_do_not_read_take_bounded_memory_and_who_reads_gets_every_image(
    tmp_path: Path, method: str
) -> None:
    pictures = [os.urandom(500 << 10) for _ in range(3)]  # which are sent along with the news of them
    memory: list[int] = []
    config = gateway_config(server={**FREE_PORTS, "max_answers_mib": ANSWERS_MIB})
    with Services(tmp_path) as services:
        gateway = services.start("gateway", config)
        worker = await ScriptedWorker("w1", gateway.fleet).start()
        worker.script.picture = pictures.__getitem__
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(gateway.address))
            job = await client.submit("a star", num_images=len(pictures), num_inference_steps=2)
            await job.result()
            channels = [await stack.enter_async_context(narrow_channel(gateway.address)) for _ in range(READERS)]
            async with _most_memory(gateway.process.pid, memory):
                raw = image_pb2.WatchJobRequest(job_id=job.id).SerializeToString()  # GetImage's has the same field
                asks: list[Any] = [channel.unary_stream(f"/{NAME}/{method}") for channel in channels]
                calls = [ask(raw) for ask in asks]
                await asyncio.gather(*(call.initial_metadata() for call in calls))
                await asyncio.sleep(0.5)
                result = await client.job(job.id).result()
                assert [picture.data for picture in result] == pictures
            for call in calls:
                call.cancel()
        await worker.die()
    assert memory[1] - memory[0] < MOST_UNREAD_BYTES


@pytest.mark.alone  # twenty times 20 MiB leave no processor to other tests
async def test_many_clients_that_would_join_with_large_messages_take_bounded_memory_and_a_member_gets_in(
    tmp_path: Path,
) -> None:
    registration = fleet_pb2.Registration(kind=kinds.CONTROLNET, name="x" * (20 << 20))
    raw = fleet_pb2.JoinRequest(registration=registration).SerializeToString()

    async def refused(channel: grpc.aio.Channel) -> BottegaError:
        # The same on the wire as a stream of one message. But a client's stream that the gateway ends while the client
        # still sends gets INTERNAL from gRPC's own client in place of the gateway's status.
        join: Any = channel.unary_unary("/bottega.v1.FleetService/Join")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await join(raw, timeout=60)
        return from_rpc_error(caught.value)

    memory: list[int] = []
    with Services(tmp_path) as services:
        gateway = services.start("gateway", gateway_config())
        async with AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(open_channel(gateway.fleet)) for _ in range(JOINING)]
            async with _most_memory(gateway.process.pid, memory):
                joining = asyncio.gather(*map(refused, channels))
                worker = await ScriptedWorker("w1", gateway.fleet).start()
                errors = await joining
        await worker.die()
    assert memory[1] - memory[0] < MOST_STRANGE_BYTES
    assert {type(error) for error in errors} <= {TooLarge, DeadlinePassed, QueueFull}
    assert TooLarge in {type(error) for error in errors}
