"""A gateway as a process, and crowds that want nothing of it: idle connections, and streams that wait.

Everybody else is served meanwhile, and where something is scarce it is told as what it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import grpc
import psutil
import pytest

from bottega.client import AsyncClient
from bottega.errors import QueueFull, TooManyOpenFiles
from bottega.rpc.channel import open_channel
from bottega.rpc.status import from_rpc_error
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.crowds import alive, connections
from tests.support.cut_cable import laid
from tests.support.running_gateway import refusal
from tests.support.services import FREE_PORTS, Service, Services, gateway_config
from tests.support.waiting import wait_until

IDLE = 1_150
MAX_STREAMS = 128
# Enough for a gateway with a crowd that is kept small, and for nothing else: 85 connections.
LOW = 256
PATIENCE_S = 60.0
SPEC = GenerationSpec(prompt="a star", num_inference_steps=4)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with Services(tmp_path_factory.mktemp("services")) as services:
        yield services


@pytest.fixture(scope="module")
def gateway(services: Services) -> Service:
    """Which a shell gave few files, and which may take more."""
    return start(services, soft=1024, hard=psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[1])


@pytest.fixture(scope="module")
def low(services: Services) -> Service:
    return start(services, soft=LOW, hard=LOW)


@contextlib.asynccontextmanager
async def working(gateway: Service) -> AsyncIterator[ScriptedWorker]:
    worker = await ScriptedWorker("w1", gateway.fleet).start()
    try:
        yield worker
    finally:
        await worker.die()


def start(services: Services, *, soft: int, hard: int) -> Service:
    config = gateway_config(server={**FREE_PORTS, "max_streams": MAX_STREAMS}, codec_processes=1)
    return services.start("gateway", config, run_by=["prlimit", f"--nofile={soft}:{hard}"])


def stub(channel: grpc.aio.Channel) -> image_pb2_grpc.ImageServiceAsyncStub:
    return image_pb2_grpc.ImageServiceStub(channel)


async def draw(address: str) -> None:
    """Draws one picture as a new caller does, who tries again for a moment."""
    async with AsyncClient(address, timeout_s=PATIENCE_S) as client:
        assert (await client.generate("a star", num_inference_steps=4)).data


def logged(gateway: Service, *, level: str = "") -> list[str]:
    return [str(event["event"]) for event in gateway.events() if not level or event["level"] == level]


def levels(gateway: Service) -> set[str]:
    return {str(event["level"]) for event in gateway.events()}


async def test_a_gateway_that_a_shell_gave_few_files_goes_on_beside_a_thousand_idle_connections(
    gateway: Service,
) -> None:
    process = psutil.Process(gateway.process.pid)
    for each in (process, *process.children()):  # what it starts has the limit from it
        assert each.rlimit(psutil.RLIMIT_NOFILE)[0] > IDLE
    async with working(gateway):
        with connections(gateway.address, IDLE):
            for _ in range(3):
                await draw(gateway.address)
    assert not logged(gateway, level="ERROR")


async def test_a_gateway_that_may_have_few_files_says_so_and_lets_others_in_beside_a_crowd(low: Service) -> None:
    (warning,) = [event for event in low.events() if event["level"] == "WARNING"]
    assert warning["limit"] == LOW
    assert "LimitNOFILE" in warning["todo"]
    async with working(low):
        with connections(low.address, 2 * LOW, source="127.0.0.2") as crowd:
            await draw(low.address)
            wait_until(lambda: alive(crowd) <= LOW // 3 // 2, "the crowd to have only its host's share")
            for _ in range(3):
                await draw(low.address)
            assert alive(crowd), "a host keeps its share"
        await draw(low.address)
    assert not logged(low, level="ERROR")
    assert "connections without calls were ended, because their host had more than its share" in logged(low)


async def test_connections_that_carry_calls_are_left_alone_in_a_crowd(low: Service) -> None:
    async with working(low) as worker, open_channel(low.address) as channel:
        worker.script.hold_at = 1
        held = stub(channel).Generate(image_pb2.GenerateRequest(spec=SPEC))
        await anext(aiter(held))
        with connections(low.address, 2 * LOW) as crowd:  # of the same host
            await asyncio.to_thread(wait_until, lambda: alive(crowd) <= LOW // 3, "the crowd to be made smaller")
            worker.script.release.set()
            events = [answer.event async for answer in held]
        assert events[-1].HasField("completed")


async def test_no_descriptor_left_is_told_as_what_it_is_and_passes(services: Services) -> None:
    gateway = start(services, soft=1024, hard=1024)
    process = psutil.Process(gateway.process.pid)
    async with working(gateway) as worker, open_channel(gateway.address) as channel:
        worker.script.hold_at = 1
        held = stub(channel).Generate(image_pb2.GenerateRequest(spec=SPEC))
        await anext(aiter(held))
        process.rlimit(psutil.RLIMIT_NOFILE, (8, 1024))  # what is open stays open, and nothing else can be opened
        worker.script.release.set()
        submit = image_pb2.SubmitJobRequest(spec=SPEC)

        await asyncio.to_thread(wait_until, lambda: "ERROR" in levels(gateway), "the picture to be kept")
        told = await refusal(lambda: stub(channel).SubmitJob(submit, timeout=PATIENCE_S))
        assert type(told) is TooManyOpenFiles
        assert (told.metadata["cause"], told.reason_name) == ("EMFILE", "TOO_MANY_OPEN_FILES")
        assert "LimitNOFILE" in told.message
        assert told.retry_after_s
        process.rlimit(psutil.RLIMIT_NOFILE, (1024, 1024))
        events = [answer.event async for answer in held]
        assert events[-1].HasField("completed"), "nothing is lost"
        await draw(gateway.address)
    (said,) = logged(gateway, level="ERROR")
    assert "too many files" in said
    assert "disk" not in said


async def test_callers_that_watch_in_crowds_keep_nobody_from_short_calls_nor_other_hosts_from_drawing(
    gateway: Service,
) -> None:
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(working(gateway))
        worker.script.hold_at = 1
        cable = await stack.enter_async_context(laid(gateway.address, source="127.0.0.2"))
        own = await stack.enter_async_context(open_channel(gateway.address))
        beside = await stack.enter_async_context(open_channel(gateway.address))
        other = await stack.enter_async_context(open_channel(cable.address))
        job = (await stub(own).SubmitJob(image_pb2.SubmitJobRequest(spec=SPEC))).job
        watches = [stub(own).WatchJob(image_pb2.WatchJobRequest(job_id=job.job_id)) for _ in range(MAX_STREAMS)]
        for watch in watches:
            stack.callback(watch.cancel)
        firsts = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
        refused = [from_rpc_error(first) for first in firsts if isinstance(first, grpc.aio.AioRpcError)]
        served = MAX_STREAMS // 4
        assert len(refused) == MAX_STREAMS - served, "a connection has a quarter of them while there is no other"
        told = {(type(error), error.metadata.get("limit"), bool(error.retry_after_s)) for error in refused}
        assert told == {(QueueFull, "max_streams", True)}
        for channel in (own, beside, other):
            await _short_calls(channel, job.job_id)
        for channel in (beside, other):
            drawing = stub(channel).Generate(image_pb2.GenerateRequest(spec=SPEC))
            assert await drawing.read() is not grpc.aio.EOF
        worker.script.release.set()
        await draw(cable.address)


async def _short_calls(channel: grpc.aio.Channel, job_id: str) -> None:
    """None of them is refused."""
    images = stub(channel)
    asked = image_pb2.GetJobRequest(job_id=job_id)
    await asyncio.gather(*(images.GetJob(asked, timeout=PATIENCE_S) for _ in range(20)))
    await images.ListJobs(image_pb2.ListJobsRequest(), timeout=PATIENCE_S)
    await images.ListModels(image_pb2.ListModelsRequest(), timeout=PATIENCE_S)
    more = (await images.SubmitJob(image_pb2.SubmitJobRequest(spec=SPEC), timeout=PATIENCE_S)).job
    await images.CancelJob(image_pb2.CancelJobRequest(job_id=more.job_id), timeout=PATIENCE_S)
