"""The worker's engine process alone, on its pipe: the most that batching can gain, without services around it.

It speaks the engine's contract (engine.proto) and knows no gRPC.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bottega.errors import InternalError
from bottega.process import ChildProcess, engine_environment
from bottega.v1.engine_pb2 import EngineCommand, EngineEvent, EngineStart
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.worker_pb2 import AttemptId
from bottega.worker.config import EngineConfig

START_TIMEOUT_S = 120.0
STOP_GRACE_S = 10.0
REQUEST_TIMEOUT_S = 600.0


class BareEngine:
    """A running engine; several `draw` may run at once."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._sending = asyncio.Lock()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._ready = asyncio.Event()
        self._started = 0
        self._reader = asyncio.create_task(self._read())

    async def ready(self) -> None:
        """Waits until the model is warm."""
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._ready.wait()

    async def draw(self, spec: GenerationSpec) -> None:
        """Draws one job, every default filled in; returns when all of its pictures have been handed over."""
        self._started += 1
        job_id = str(self._started)
        done = self._waiting[job_id] = asyncio.get_running_loop().create_future()
        command = EngineCommand(start=EngineStart(attempt=AttemptId(job_id=job_id, number=1), spec=spec))
        async with self._sending:
            await self._child.channel.send(command.SerializeToString())
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await done

    async def stop(self) -> None:
        """Ends the engine."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._child.stop(STOP_GRACE_S)

    async def _read(self) -> None:
        while (frame := await self._child.channel.recv()) is not None:
            event = EngineEvent.FromString(frame)
            match event.WhichOneof("event"):
                case "ready":
                    self._ready.set()
                case "done":
                    self._waiting.pop(event.done.attempt.job_id).set_result(None)
                case "failed":
                    error = InternalError(event.failed.error.message)
                    self._waiting.pop(event.failed.attempt.job_id).set_exception(error)
        for waiting in self._waiting.values():
            waiting.set_exception(InternalError("the engine ended"))


@asynccontextmanager
async def running(model: str, threads: int) -> AsyncIterator[BareEngine]:
    """An engine of `model`, warm."""
    config = EngineConfig(model=model, threads=threads)
    settings = json.dumps(dataclasses.asdict(config))
    variables = engine_environment(exclusive_cores=config.exclusive_cores)
    engine = BareEngine(
        await ChildProcess.start("bottega.worker.engine.main", "--config-json", settings, env=variables)
    )
    try:
        await engine.ready()
        yield engine
    finally:
        await engine.stop()
