"""The life of the worker's front: engines that are lost, a place in the fleet, draining and stopping."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from bottega.errors import Code, ConfigError, InternalError
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from bottega.rpc.status import from_rpc_error
from bottega.v1 import error_pb2, fleet_pb2, fleet_pb2_grpc, worker_pb2
from bottega.worker.attempts import Attempts
from bottega.worker.config import EngineConfig, WorkerServerConfig
from tests.support.running_front import CONFIG, Running, Start, kinds, request, running_workers
from tests.support.waiting import eventually


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with running_workers() as start:
        yield start


@pytest.mark.parametrize("prompt", ["die", "hang", "stall"])
async def test_a_lost_engine_fails_what_it_held_and_is_replaced(start: Start, prompt: str) -> None:
    running = await start()
    before = running.engine.pid
    bystander = request("slower", job_id="bystander")
    bystander.spec.num_inference_steps = 200
    beside = asyncio.create_task(running.events(bystander))
    await running.drawing()
    events = await running.events(request(prompt))
    for lost in (events[-1].failed, (await beside)[-1].failed):
        assert (lost.reason, lost.code) == (error_pb2.ERROR_REASON_WORKER_LOST, Code.UNAVAILABLE)
        assert (lost.metadata["died"], lost.metadata["held_together"]) == ("engine", "2")
    await eventually(lambda: running.engine.pid not in {None, before})
    await eventually(running.is_serving)
    assert kinds(await running.events(request(number=2)))[-1] == "completed"


async def test_an_engine_that_compiles_is_not_taken_for_hung(start: Start) -> None:
    running = await start()
    before = running.engine.pid
    assert kinds(await running.events(request("compile")))[-1] == "completed"
    assert running.engine.pid == before


async def test_a_front_that_was_stopped_itself_kills_no_engine_that_lives(start: Start) -> None:
    running = await start()
    before = running.engine.pid
    order = request("slow")
    order.spec.num_inference_steps = 200  # 4 s
    following = asyncio.create_task(running.events(order))
    await running.drawing()
    _be_stopped(CONFIG.stall_s + CONFIG.hang_s)
    assert kinds(await following)[-1] == "completed"
    _be_stopped(2 * CONFIG.hang_s)
    await asyncio.sleep(2 * CONFIG.hang_s)
    assert running.engine.pid == before


def _be_stopped(seconds: float) -> None:
    """As SIGSTOP does to a front: it hears nothing, while its engine goes on."""
    time.sleep(seconds)


async def test_while_there_is_no_engine_health_says_so(start: Start, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.touch()
    running = await start(replace(CONFIG, engine=EngineConfig(model=str(model))))
    assert await running.is_serving()
    model.write_text("stuck")
    assert running.engine.pid
    os.kill(running.engine.pid, signal.SIGKILL)

    async def is_lost() -> bool:
        return not await running.is_serving()

    await eventually(is_lost)
    events = await running.events(request())
    assert events[-1].failed.reason == error_pb2.ERROR_REASON_WORKER_LOST


async def test_a_fault_while_results_are_swept_is_logged_and_they_are_swept_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bottega.worker.worker._REST_SWEEP_INTERVAL_S", 0.05)
    sweeps = 0

    def sweep(_: Attempts) -> None:
        nonlocal sweeps
        sweeps += 1
        if sweeps == 1:
            raise OSError("a fault")

    monkeypatch.setattr(Attempts, "sweep", sweep)
    await start()
    await eventually(lambda: sweeps >= 2)
    assert [line.levelname for line in caplog.records if line.exc_info] == ["ERROR"]


async def test_an_engine_that_never_gets_ready_ends_the_start(start: Start) -> None:
    with pytest.raises(InternalError, match="could not be started"):
        await start(replace(CONFIG, engine=EngineConfig(model="broken")))


@pytest.mark.parametrize("was_ready", [False, True])
async def test_an_engine_that_cannot_use_its_configuration_is_not_started_again(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, was_ready: bool
) -> None:
    model = tmp_path / "model"
    config = replace(CONFIG, engine=EngineConfig(model=str(model)))
    model.write_text("" if was_ready else "unusable")
    if was_ready:
        running = await start(config)
        model.write_text("unusable")
        await _lose_engine(running)
        await asyncio.wait([running.worker.failed], timeout=15)
        error = running.worker.failed.result()
    else:
        with pytest.raises(ConfigError) as caught:
            await start(config)
        error = caught.value
    assert isinstance(error, ConfigError)
    assert error.message == "the engine cannot use its configuration; its last log lines say why"
    starts = [line.was_ready for line in caplog.records if line.message == "engine lost"]  # type: ignore[attr-defined]
    assert starts == ([True, False] if was_ready else [False])


async def test_an_engine_that_makes_no_progress_ends_the_start_which_says_where(start: Start) -> None:
    began_s = time.monotonic()
    with pytest.raises(InternalError, match="it sent no message for 3 s while loading unet, before it was ready"):
        await start(replace(CONFIG, start_stall_s=3.0, engine=EngineConfig(model="stuck")))
    assert time.monotonic() - began_s < 15


async def test_a_worker_whose_engine_does_not_come_back_gives_up_after_the_third_time(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    model.touch()
    running = await start(replace(CONFIG, engine=EngineConfig(model=str(model))))
    model.unlink()
    await _lose_engine(running)
    await asyncio.wait([running.worker.failed], timeout=15)
    error = running.worker.failed.result()
    assert "3 times in a row" in error.message
    assert [line.was_ready for line in caplog.records if line.message == "engine lost"] == [True, False, False, False]  # type: ignore[attr-defined]


async def test_engines_that_got_ready_between_are_no_row(start: Start, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.touch()
    running = await start(replace(CONFIG, engine=EngineConfig(model=str(model))))
    for _ in range(4):
        await _lose_engine(running)
        await eventually(running.is_serving)
    assert not running.worker.failed.done()


async def _lose_engine(running: Running) -> None:
    before = running.engine.pid
    assert before
    os.kill(before, signal.SIGKILL)
    await eventually(lambda: running.engine.pid not in (None, before))


async def test_draining_refuses_new_work_and_finishes_what_runs(start: Start) -> None:
    running = await start()
    order = request("slow")
    order.spec.num_inference_steps = 100
    watching = running.stub.WatchCheckpoints(worker_pb2.WatchCheckpointsRequest(), timeout=15)
    following = asyncio.create_task(running.events(order))
    await running.drawing()
    draining = asyncio.create_task(running.server.drain(running.worker.drain))
    await eventually(lambda: running.worker.load().draining)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await running.events(request(job_id="new"))
    assert from_rpc_error(refused.value).reason == error_pb2.ERROR_REASON_DRAINING
    assert not draining.done()
    assert kinds(await following)[-1] == "completed"
    assert [c.steps_done async for c in watching][-1] > 1
    await asyncio.wait_for(draining, 5)


async def test_what_does_not_end_within_the_grace_is_handed_over(start: Start) -> None:
    running = await start(replace(CONFIG, server=WorkerServerConfig(drain_grace_s=0.3)))
    orders = [request("slower", job_id=f"job-{number}") for number in range(2)]
    for order in orders:
        order.spec.num_inference_steps = 200
    following = [asyncio.create_task(running.events(order)) for order in orders]
    await eventually(lambda: sum(a.steps_done > 0 for a in running.worker.attempts) == 2)
    await asyncio.wait_for(running.server.drain(running.worker.drain), 5)
    for events in await asyncio.gather(*following):
        assert kinds(events)[-1] == "failed"
        assert events[-1].failed.reason == error_pb2.ERROR_REASON_DRAINING
        assert "another worker draws the job" in events[-1].failed.message


async def test_stopping_leaves_no_process(start: Start) -> None:
    others = psutil.Process().children()
    running = await start()
    await running.events(request())  # its picture is encoded by another process
    children = [child for child in psutil.Process().children() if child not in others]
    assert len(children) >= 2
    await running.server.stop()
    await running.worker.stop()
    assert not any(child.is_running() for child in children)


class Gateway(fleet_pb2_grpc.FleetServiceServicer):
    """A fleet that remembers what it was told, and says that three requests wait and where a LoRA store is."""

    def __init__(self) -> None:
        self.registrations: list[fleet_pb2.Registration] = []
        self.loads: list[fleet_pb2.Load] = []
        self.members = 0
        self.address = ""

    @property
    def served(self) -> list[fleet_pb2.Registration]:
        """Those of workers whose engines were ready."""
        return [registration for registration in self.registrations if registration.models]

    async def Join(
        self, request_iterator: AsyncIterator[fleet_pb2.JoinRequest], context: object
    ) -> AsyncIterator[fleet_pb2.JoinResponse]:
        self.members += 1
        try:  # a worker may leave before it has read the answer
            yield fleet_pb2.JoinResponse(
                backlog=3, services=[fleet_pb2.ServiceAddress(kind="loras", name="shelf", address="host:1")]
            )
            async for message in request_iterator:
                if message.HasField("registration"):
                    self.registrations.append(message.registration)
                else:
                    self.loads.append(message.load)
        finally:
            self.members -= 1


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    served = Gateway()  # type: ignore[abstract]
    server = Server("gateway", ServerConfig())
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(served, server.grpc)
    await server.start()
    served.address = server.address
    yield served
    await server.stop()


async def test_while_its_engine_starts_the_worker_says_how_far_that_is(gateway: Gateway, start: Start) -> None:
    """The start takes longer than an engine may make no progress."""
    config = replace(CONFIG, gateway=gateway.address, start_stall_s=1.5, engine=EngineConfig(model="slow"))
    starting = asyncio.ensure_future(start(config))
    await eventually(lambda: any(load.starting.done_bytes for load in gateway.loads))
    assert [list(registration.models) for registration in gateway.registrations] == [[]]
    said = next(load.starting for load in gateway.loads if load.starting.done_bytes)
    assert (said.stage, said.total_bytes) == ("loading unet", 5 * 10**9)
    assert (await starting).worker.load().start_s > 2.0
    await eventually(lambda: len(gateway.served) == 1)
    joined = len(gateway.loads)
    await eventually(lambda: len(gateway.loads) > joined)
    assert not gateway.loads[-1].HasField("starting")
    first, second = gateway.registrations
    assert first.instance == second.instance


async def test_the_worker_is_in_the_fleet_while_its_engine_is_ready(gateway: Gateway, start: Start) -> None:
    began = time.monotonic()
    running = await start(replace(CONFIG, gateway=gateway.address))
    await eventually(lambda: bool(gateway.served) and bool(gateway.loads))
    registration = gateway.registrations[-1]
    assert (registration.name, registration.address) == ("w", running.server.address)
    assert [model.name for model in registration.models] == ["scripted"]
    await eventually(lambda: gateway.loads[-1].fixed_s == 3)  # the backlog reached the engine
    await eventually(lambda: [item.digest for item in gateway.loads[-1].hosted] == ["shelf at host:1"])
    assert gateway.loads[-1].step_times[0].rows == 2
    assert gateway.loads[-1].max_rows == 16
    await eventually(lambda: gateway.loads[-1].memory_bytes > 2**20)
    started_s = gateway.loads[-1].start_s
    assert 0 < started_s <= time.monotonic() - began
    assert running.server.registry.get_sample_value("bottega_worker_engine_start_seconds") == started_s
    told, since = len(gateway.loads), time.monotonic()
    await eventually(lambda: len(gateway.loads) > told + 1)
    reports, in_s = len(gateway.loads) - told, time.monotonic() - since
    assert reports <= 4 * (in_s + 0.5), "ten beats a second say the same, which two reports do as well"
    slow = request("slower")
    slow.spec.num_inference_steps = 200
    following = asyncio.create_task(running.events(slow))
    await eventually(lambda: any(0 < r.steps_left < 200 for r in gateway.loads[-1].running))
    assert running.engine.pid
    killed = time.monotonic()
    os.kill(running.engine.pid, signal.SIGKILL)
    await eventually(lambda: gateway.members == 1 and len(gateway.served) == 2)  # it left, and came again
    told = len(gateway.loads)
    await eventually(lambda: len(gateway.loads) > told)
    await eventually(
        lambda: [item.digest for item in gateway.loads[-1].hosted] == ["shelf at host:1"]
    )  # so did they the next engine
    assert 0 < gateway.loads[-1].start_s <= time.monotonic() - killed
    assert gateway.loads[-1].start_s != started_s
    assert (await following)[-1].failed.reason == error_pb2.ERROR_REASON_WORKER_LOST
    await running.worker.stop()
    await eventually(lambda: gateway.members == 0)
