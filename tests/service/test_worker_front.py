"""The worker's front between a real gRPC server and an engine that follows a script."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2
from PIL import Image

from bottega.codec import CodecPool
from bottega.errors import Code, InternalError, StaleAttempt
from bottega.rpc.channel import open_channel
from bottega.rpc.server import Server, ServerConfig
from bottega.rpc.status import from_rpc_error
from bottega.v1 import error_pb2, fleet_pb2, fleet_pb2_grpc, generation_pb2, worker_pb2, worker_pb2_grpc
from bottega.worker.__main__ import build
from bottega.worker.config import EngineConfig, WorkerConfig
from bottega.worker.engine_front import EngineFront
from bottega.worker.worker import Worker

CONFIG = WorkerConfig(name="w", gateway="", hang_s=1.0, start_s=20.0)


class Running:
    """A worker that serves, and a stub to call it."""

    def __init__(self, server: Server, worker: Worker, engine: EngineFront, channel: grpc.aio.Channel) -> None:
        self.server, self.worker, self.engine, self.channel = server, worker, engine, channel
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)

    async def events(
        self, request: worker_pb2.RunAttemptRequest, *, until: str = ""
    ) -> list[worker_pb2.RunAttemptResponse]:
        """What RunAttempt streams; broken off after the first event of the kind `until`."""
        events = []
        call = self.stub.RunAttempt(request, timeout=15)
        async for event in call:
            events.append(event)
            if event.WhichOneof("event") == until:
                call.cancel()
                break
        return events

    async def is_serving(self) -> bool:
        check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(), timeout=5)
        return answer.status == health_pb2.HealthCheckResponse.SERVING


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    running: list[Running] = []

    async def begin(config: WorkerConfig = CONFIG) -> Running:
        engine = EngineFront(config.engine, start_s=config.start_s, hang_s=config.hang_s, module="scripted_engine")
        await engine.spawn()
        pool = CodecPool()
        await pool.start()
        server, worker = build(config, engine, pool)
        await server.start()
        try:
            await worker.start()
        except BaseException:
            await server.stop()
            await worker.stop()
            raise
        await server.set_serving(True)
        running.append(Running(server, worker, engine, open_channel(server.address)))
        return running[-1]

    yield begin
    for each in running:
        await each.channel.close()
        await each.server.stop()
        await each.worker.stop()


def request(
    prompt: str = "flat", *, job_id: str = "job", number: int = 1, image: bytes | None = None, **fields: object
) -> worker_pb2.RunAttemptRequest:
    spec = generation_pb2.GenerationSpec(
        model="scripted",
        prompt=prompt,
        num_inference_steps=5,
        width=16,
        height=8,
        seed=7,
        num_images=1,
        image=image,
    )
    attempt = worker_pb2.AttemptId(job_id=job_id, number=number)
    return worker_pb2.RunAttemptRequest(attempt=attempt, spec=spec, **fields)  # type: ignore[arg-type]


def kinds(events: list[worker_pb2.RunAttemptResponse]) -> list[str]:
    return [str(event.WhichOneof("event")) for event in events]


def images(events: list[worker_pb2.RunAttemptResponse]) -> dict[int, bytes]:
    parts: dict[int, bytes] = {}
    for event in events:
        if event.HasField("image"):
            parts[event.image.index] = parts.get(event.image.index, b"") + event.image.chunk
    return parts


def png(width: int, height: int, colour: str = "teal") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()


async def eventually(condition: Callable[[], bool | Awaitable[bool]], within_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {within_s:g} s")


async def test_an_attempt_is_drawn_encoded_and_inscribed(start: Start) -> None:
    running = await start()
    order = request("a flat colour, 星")
    order.spec.num_images = 2
    events = await running.events(order)
    assert kinds(events)[0] == "started"
    assert kinds(events)[-1] == "completed"
    pictures = images(events)
    assert sorted(pictures) == [0, 1]
    for index, data in pictures.items():
        with Image.open(io.BytesIO(data)) as picture:
            assert (picture.size, picture.getpixel((0, 0))) == ((16, 8), (7 + index,) * 3)
            single = json_format.Parse(picture.info["bottega"], generation_pb2.GenerationSpec())
            assert "a flat colour, 星. Steps: 5, Seed: " + str(7 + index) in picture.info["parameters"]
        expected = generation_pb2.GenerationSpec()
        expected.CopyFrom(order.spec)
        expected.num_images = 1
        expected.seed = 7 + index
        assert single == expected
        assert "num_inference_steps" in picture.info["bottega"]
    provenance = events[-1].completed.provenance
    assert (provenance.worker, provenance.model_hash, provenance.bottega_version) == ("w", "abc", "0.1.0")
    assert provenance.parameters == order.spec
    times = {time.stage: time.seconds for time in provenance.times}
    assert times.keys() == {"handoff", "encode_image"}
    assert 0 < times["handoff"] < 1


async def test_an_attempts_lines_in_the_log_carry_its_request_id(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bottega.worker")
    running = await start()
    await running.events(request(request_id="log-drawn", number=2, checkpoint=b"3"))
    await running.events(request("nan", job_id="bad", request_id="log-failed"))
    lines = [(line.__dict__["request_id"], line) for line in caplog.records if hasattr(line, "request_id")]
    drawn = [line for request_id, line in lines if request_id == "log-drawn"]
    assert [line.message for line in drawn] == ["attempt started", "attempt completed"]
    for line in drawn:
        assert (line.__dict__["job_id"], line.__dict__["attempt"], line.__dict__["model"]) == ("job", 2, "scripted")
    assert 0 < drawn[-1].__dict__["seconds"] < 10
    failed = [line for request_id, line in lines if request_id == "log-failed"]
    assert [line.message for line in failed] == ["attempt started", "attempt failed"]
    assert failed[-1].__dict__["reason"] == "NOT_FINITE"


async def test_the_source_image_reaches_the_engine_resized_and_no_further(start: Start) -> None:
    running = await start()
    events = await running.events(request(image=png(50, 40, "teal"), number=3))
    with Image.open(io.BytesIO(images(events)[0])) as picture:
        assert (picture.size, picture.getpixel((8, 4))) == ((16, 8), (0, 128, 128))
        assert "image" not in json.loads(picture.info["bottega"])
    provenance = events[-1].completed.provenance
    assert len(provenance.image_digest) == 64
    assert not provenance.parameters.HasField("image")
    assert "decode_image" in {time.stage for time in provenance.times}


async def test_formats_and_previews_are_as_asked(start: Start) -> None:
    running = await start()
    order = request(preview=True)
    order.spec.format = generation_pb2.IMAGE_FORMAT_WEBP
    order.spec.quality = 100
    events = await running.events(order)
    with Image.open(io.BytesIO(images(events)[0])) as picture:
        assert picture.format == "WEBP"
    previews = [event.progress.preview_jpeg for event in events if event.progress.preview_jpeg]
    assert previews
    with Image.open(io.BytesIO(previews[-1])) as preview:
        assert (preview.format, preview.size) == ("JPEG", (8, 8))


async def test_a_bad_source_image_fails_the_attempt_only(start: Start) -> None:
    running = await start()
    events = await running.events(request(image=b"no image"))
    assert kinds(events) == ["failed"]
    assert events[0].failed.reason == error_pb2.ERROR_REASON_BAD_IMAGE
    assert kinds(await running.events(request(job_id="other")))[-1] == "completed"


async def test_what_the_engine_refuses_is_told(start: Start) -> None:
    running = await start()
    events = await running.events(request("nan"))
    assert events[-1].failed.reason == error_pb2.ERROR_REASON_NOT_FINITE


async def test_breaking_the_stream_stops_nothing_and_attaching_gets_the_same_bytes(start: Start) -> None:
    running = await start()
    order = request("slow")
    assert kinds(await running.events(order, until="progress"))[-1] == "progress"
    first = await running.events(order)
    again = await running.events(order)
    assert images(first) == images(again)
    assert images(first)
    assert kinds(again)[-1] == "completed"
    assert running.worker.load().running == []


async def test_cancelling_stops_and_forgets(start: Start) -> None:
    running = await start()
    order = request("slow")
    order.spec.num_inference_steps = 500
    following = asyncio.create_task(running.events(order))
    await eventually(lambda: any(a.steps_done > 0 for a in running.worker.attempts))
    cancel = worker_pb2.CancelAttemptRequest(attempt=order.attempt)
    assert (await running.stub.CancelAttempt(cancel, timeout=5)).known
    assert (await following)[-1].failed.reason == error_pb2.ERROR_REASON_JOB_CANCELLED
    assert not (await running.stub.CancelAttempt(cancel, timeout=5)).known
    listed = await running.stub.ListAttempts(worker_pb2.ListAttemptsRequest(), timeout=5)
    assert not listed.attempts
    await eventually(lambda: running.worker.load().fixed_s == 100)  # the engine was told, once
    order.spec.num_inference_steps = 5
    assert kinds(await running.events(order))[-1] == "completed"


async def test_a_later_attempt_supersedes_and_an_earlier_one_is_refused(start: Start) -> None:
    running = await start()
    slow = request("slow")
    slow.spec.num_inference_steps = 500
    first = asyncio.create_task(running.events(slow))
    await eventually(lambda: any(a.steps_done > 0 for a in running.worker.attempts))
    second = await running.events(request(number=2))
    assert kinds(second)[-1] == "completed"
    assert (await first)[-1].failed.reason == error_pb2.ERROR_REASON_STALE_ATTEMPT
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await running.events(slow)
    assert isinstance(from_rpc_error(refused.value), StaleAttempt)


async def test_an_attempt_ends_with_its_deadline(start: Start) -> None:
    running = await start()
    order = request("slow", deadline_s=0.2)
    order.spec.num_inference_steps = 500
    events = await running.events(order)
    assert events[-1].failed.reason == error_pb2.ERROR_REASON_DEADLINE_PASSED


async def test_checkpoints_stream_and_resume(start: Start) -> None:
    running = await start()
    order = request("slow")
    order.spec.num_inference_steps = 20
    watching = running.stub.WatchCheckpoints(worker_pb2.WatchCheckpointsRequest(), timeout=15)
    following = asyncio.create_task(running.events(order))
    newest = 0
    async for checkpoint in watching:
        assert checkpoint.attempt == order.attempt
        assert checkpoint.steps_done > newest
        newest = checkpoint.steps_done
        if newest >= 3:
            break
    watching.cancel()
    await following
    resumed = request(number=2, checkpoint=b"4")
    events = await running.events(resumed)
    assert (events[0].started.steps_total, events[0].started.steps_resumed) == (5, 4)


async def test_the_same_order_is_the_same_bytes_in_another_job_and_resumed_on_another_worker(start: Start) -> None:
    one, other = await start(), await start(replace(CONFIG, name="another"))
    order = request("a flat colour, 星")
    order.spec.num_images = 2
    resumed = request("a flat colour, 星", number=2, checkpoint=b"3", request_id="again")
    resumed.spec.num_images = 2
    again = request("a flat colour, 星", job_id="again")
    again.spec.num_images = 2
    first = images(await one.events(order))
    assert sorted(first) == [0, 1]
    assert images(await other.events(resumed)) == first
    assert images(await other.events(again)) == first


@pytest.mark.parametrize("prompt", ["die", "hang"])
async def test_a_lost_engine_fails_what_it_held_and_is_replaced(start: Start, prompt: str) -> None:
    running = await start()
    before = running.engine.pid
    bystander = request("slow", job_id="bystander")
    bystander.spec.num_inference_steps = 500
    beside = asyncio.create_task(running.events(bystander))
    await eventually(lambda: any(a.steps_done > 0 for a in running.worker.attempts))
    events = await running.events(request(prompt))
    for lost in (events[-1].failed, (await beside)[-1].failed):
        assert (lost.reason, lost.code) == (error_pb2.ERROR_REASON_WORKER_LOST, Code.UNAVAILABLE)
        assert lost.metadata["held_together"] == "2"
    await eventually(lambda: running.engine.pid not in {None, before})
    await eventually(running.is_serving)
    assert kinds(await running.events(request(number=2)))[-1] == "completed"


async def test_while_there_is_no_engine_health_says_so(start: Start) -> None:
    running = await start()
    assert await running.is_serving()
    assert running.engine.pid
    os.kill(running.engine.pid, signal.SIGKILL)
    while await running.is_serving():
        pass
    events = await running.events(request())
    assert events[-1].failed.reason == error_pb2.ERROR_REASON_WORKER_LOST


async def test_an_engine_that_never_gets_ready_ends_the_start(start: Start) -> None:
    with pytest.raises(InternalError, match="could not be started"):
        await start(replace(CONFIG, engine=EngineConfig(model="broken")))


async def test_draining_refuses_new_work_and_finishes_what_runs(start: Start) -> None:
    running = await start()
    order = request("slow")
    order.spec.num_inference_steps = 30
    watching = running.stub.WatchCheckpoints(worker_pb2.WatchCheckpointsRequest(), timeout=15)
    following = asyncio.create_task(running.events(order))
    await eventually(lambda: any(a.steps_done > 0 for a in running.worker.attempts))
    draining = asyncio.create_task(running.server.drain(running.worker.drain))
    await eventually(lambda: running.worker.load().draining)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await running.events(request(job_id="new"))
    assert from_rpc_error(refused.value).reason == error_pb2.ERROR_REASON_DRAINING
    assert not draining.done()
    assert kinds(await following)[-1] == "completed"
    assert [c.steps_done async for c in watching][-1] > 1
    await asyncio.wait_for(draining, 5)


async def test_stopping_leaves_no_process(start: Start) -> None:
    others = psutil.Process().children()
    running = await start()
    children = [child for child in psutil.Process().children() if child not in others]
    assert len(children) >= 2
    await running.server.stop()
    await running.worker.stop()
    assert not any(child.is_running() for child in children)


@pytest.mark.parametrize("raw", [b"\xff\xff", b"", worker_pb2.RunAttemptRequest().SerializeToString()])
async def test_a_request_that_names_no_attempt_is_refused(start: Start, raw: bytes) -> None:
    running = await start()
    run_attempt: Any = running.channel.unary_stream("/bottega.v1.WorkerService/RunAttempt")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await run_attempt(raw).read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


class Gateway(fleet_pb2_grpc.FleetServiceServicer):
    """A fleet that remembers what it was told and says that three requests wait."""

    def __init__(self) -> None:
        self.registrations: list[fleet_pb2.Registration] = []
        self.loads: list[fleet_pb2.Load] = []
        self.members = 0

    async def Join(
        self, request_iterator: AsyncIterator[fleet_pb2.JoinRequest], context: object
    ) -> AsyncIterator[fleet_pb2.JoinResponse]:
        self.members += 1
        yield fleet_pb2.JoinResponse(backlog=3)
        try:
            async for message in request_iterator:
                if message.HasField("registration"):
                    self.registrations.append(message.registration)
                else:
                    self.loads.append(message.load)
        finally:
            self.members -= 1

    async def ListMembers(self, request: object, context: object) -> fleet_pb2.ListMembersResponse:
        raise NotImplementedError


async def test_the_worker_is_in_the_fleet_while_its_engine_is_ready(start: Start) -> None:
    gateway = Gateway()
    server = Server("gateway", ServerConfig())
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(gateway, server.grpc)
    await server.start()
    running = await start(replace(CONFIG, gateway=server.address))
    await eventually(lambda: bool(gateway.loads))
    registration = gateway.registrations[0]
    assert (registration.name, registration.address) == ("w", running.server.address)
    assert [model.name for model in registration.models] == ["scripted"]
    await eventually(lambda: gateway.loads[-1].fixed_s == 3)  # the backlog reached the engine
    assert gateway.loads[-1].step_times[0].rows == 2
    assert gateway.loads[-1].max_rows == 16
    await eventually(lambda: gateway.loads[-1].memory_bytes > 2**20)
    slow = request("slow")
    slow.spec.num_inference_steps = 100
    following = asyncio.create_task(running.events(slow))
    await eventually(lambda: any(0 < r.steps_left < 100 for r in gateway.loads[-1].running))
    assert running.engine.pid
    os.kill(running.engine.pid, signal.SIGKILL)
    await eventually(lambda: gateway.members == 0)
    await eventually(lambda: gateway.members == 1 and len(gateway.registrations) == 2)
    assert (await following)[-1].failed.reason == error_pb2.ERROR_REASON_WORKER_LOST
    await running.worker.stop()
    await eventually(lambda: gateway.members == 0)
    await server.stop()
