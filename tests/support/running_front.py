"""A worker's front on a real gRPC server, for the tests of one event loop. Its engine follows a script, or is real."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from PIL import Image

from bottega.codec.pool import CodecPool
from bottega.process.engine_supervisor import EngineTimeouts
from bottega.rpc.channel import MAX_ATTEMPT_MIB, open_channel
from bottega.rpc.server import Server
from bottega.v1 import activations_pb2_grpc, generation_pb2, worker_pb2, worker_pb2_grpc
from bottega.worker.__main__ import build
from bottega.worker.config import WorkerConfig
from bottega.worker.engine_client import WorkerEngineClient
from bottega.worker.worker import Worker
from tests.samples.hostile_images import saved
from tests.support.waiting import eventually

CONFIG = WorkerConfig(name="w", gateway="", hang_s=1.0, stall_s=1.5, start_stall_s=20.0)

ROOT = Path(__file__).resolve().parents[2]

_jobs = itertools.count()


class Running:
    """A worker that serves, and a stub to call it."""

    def __init__(self, server: Server, worker: Worker, engine: WorkerEngineClient, channel: grpc.aio.Channel) -> None:
        self.server, self.worker, self.engine, self.channel = server, worker, engine, channel
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self.templates = activations_pb2_grpc.TemplateServiceStub(channel)

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

    async def drawing(self) -> None:
        """Returns when a step is done of an attempt that runs."""
        await eventually(lambda: any(each.steps_done > 0 and not each.ended for each in self.worker.attempts))

    async def is_serving(self) -> bool:
        check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(), timeout=5)
        return answer.status == health_pb2.HealthCheckResponse.SERVING


Start = Callable[..., Awaitable[Running]]


@contextlib.asynccontextmanager
async def running_workers() -> AsyncIterator[Start]:
    """Gives the function that starts a worker and returns when it serves; all of them end with the block.

    module: of the engine process.
    """
    running: list[Running] = []

    async def start(config: WorkerConfig = CONFIG, *, module: str = "tests.fakes.scripted_engine") -> Running:
        engine = WorkerEngineClient(
            config.engine,
            timeouts=EngineTimeouts(start_stall_s=config.start_stall_s, hang_s=config.hang_s, stall_s=config.stall_s),
            module=module,
        )
        await engine.spawn()
        pool = CodecPool(idle_s=600.0)  # its processes start with the first image, and many attempts have none
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
        running.append(Running(server, worker, engine, open_channel(server.address, max_message_mib=MAX_ATTEMPT_MIB)))
        return running[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # where the engine's module is found
        try:
            yield start
        finally:
            for each in running:
                await each.channel.close()
                await each.server.stop()
                await each.worker.stop()


def request(
    prompt: str = "flat", *, job_id: str = "", number: int = 1, image: bytes | None = None, **fields: object
) -> worker_pb2.RunAttemptRequest:
    """An attempt. job_id: by default that of no other."""
    spec = generation_pb2.GenerationSpec(
        model="scripted",
        prompt=prompt,
        num_inference_steps=5,
        guidance_scale=4.0,
        width=16,
        height=8,
        seed=7,
        num_images=1,
        image=image,
        strength=None if image is None else 0.6,
    )
    attempt = worker_pb2.AttemptId(job_id=job_id or f"job-{next(_jobs)}", number=number)
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
    return saved(Image.new("RGB", (width, height), colour))
