"""What does joining and leaving the batch at every step gain, on an embedded model?

Closed loop: eight clients, in images per second, against Diffusers one at a time and against the bare engine, which is
the worker's engine process alone on its pipe: the most that batching can gain, without services around it.
Open loop: the same Poisson arrivals, at .7 of the measured capacity of static batches, with 20, 30 and 50 steps mixed,
for the suite and for static batches; p95 of the time from the intended arrival to the picture.

A run takes 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from bottega.client import AsyncClient
from bottega.client.types.models import EMBEDDED_MODEL, ServedModel
from bottega.client.types.options import SAMPLERS
from bottega.errors import InternalError
from bottega.model_files.folder_check import folder_of
from bottega.process.child import ChildProcess
from bottega.process.engine_supervisor import engine_environment
from bottega.v1.engine_pb2 import EngineCommand, EngineEvent, EngineStart
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.worker_pb2 import AttemptId, RunAttemptRequest
from bottega.worker.config import EngineConfig
from load.bench.framework import CORES, GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet, closed_loop, medians, percentile
from load.bench.side_process import Side
from load.bench.static_batches import MAX_BATCH, StaticServer
from load.bench.stock import stock
from load.bench.suites import plain_suite
from load.replay.arrivals import poisson
from load.replay.driver import replay
from load.replay.results import Result

CLIENTS = 8
CLOSED_STEPS = 20
MIXED_STEPS = (20, 30, 50)
LOAD = 0.7
# A seed makes a run repeatable; which one does not matter.
ARRIVALS_SEED = 8
_DEADLINE_S = 600.0
_START_S, _STOP_S = 120.0, 10.0
BENCH = Bench(
    __file__,
    __doc__,
    Option("--requests", 300, "of the open loop, on each side", smallest=2),
    Option("--closed-requests", 32, "of a round of the closed loop", smallest=2),
    Option("--capacity-batches", 6, "to measure the capacity of static batches", smallest=1),
    Option("--rounds", 3, "in which the sides take turns", smallest=1),
    Option("--threads", CORES, "of torch, on each side"),
    Option("--model", EMBEDDED_MODEL, "an embedded model, or a folder in Diffusers' layout"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A request of the open loop."""

    number: int
    """From 0; its seed."""
    at_s: float
    steps: int


class BareEngine:
    """A worker's engine process alone, driven by its pipe; several `draw` may run at once."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._sending = asyncio.Lock()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._ready = asyncio.Event()
        self._started = 0
        self._reader = asyncio.create_task(self._read())

    @classmethod
    @asynccontextmanager
    async def running(cls, model: str, threads: int) -> AsyncIterator[BareEngine]:
        """Run an engine of a model, warm."""
        config = EngineConfig(model=model, threads=threads)
        settings = json.dumps(dataclasses.asdict(config))
        variables = engine_environment(exclusive_cores=config.exclusive_cores)
        engine = cls(await ChildProcess.start("bottega.worker.engine.main", "--config-json", settings, env=variables))
        try:
            async with asyncio.timeout(_START_S):
                await engine._ready.wait()
            yield engine
        finally:
            engine._reader.cancel()
            await asyncio.gather(engine._reader, return_exceptions=True)
            await engine._child.stop(_STOP_S)

    async def draw(self, spec: GenerationSpec) -> None:
        """Draw one job, every default filled in; return when all of its pictures have been handed over."""
        self._started += 1
        job_id = str(self._started)
        done = self._waiting[job_id] = asyncio.get_running_loop().create_future()
        request = RunAttemptRequest(attempt=AttemptId(job_id=job_id, number=1), spec=spec)
        command = EngineCommand(start=EngineStart(request=request))
        async with self._sending:
            await self._child.channel.send(command.SerializeToString())
        async with asyncio.timeout(_DEADLINE_S):
            await done

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The sides, which live through the whole run; one of them at a time has something to do."""

    reference: Side
    engine: BareEngine
    client: AsyncClient
    model: ServedModel

    def draw_static(self, seeds: Sequence[int], steps: int) -> float:
        """Draw a batch by Diffusers; return its seconds."""
        return self.reference.ask(prompts=[PROMPT] * len(seeds), seeds=list(seeds), steps=steps)["seconds"]

    async def draw(self, seed: int, steps: int) -> None:
        """Draw through the suite."""
        await self.client.generate(PROMPT, seed=seed, num_inference_steps=steps, guidance_scale=GUIDANCE_SCALE)

    async def closed(self, requests: int) -> dict[str, float]:
        """Return images per second of each side."""

        async def plain(number: int) -> None:
            await asyncio.to_thread(self.draw_static, [number], CLOSED_STEPS)

        return {
            "plain": await closed_loop(plain, requests=requests, clients=1),
            "engine": await closed_loop(
                lambda number: self.engine.draw(_spec(self.model, number)), requests=requests, clients=CLIENTS
            ),
            "suite": await closed_loop(
                lambda number: self.draw(number, CLOSED_STEPS), requests=requests, clients=CLIENTS
            ),
        }

    async def static_capacity(self, rng: random.Random, batches: int) -> float:
        """Return images per second of full static batches, each run to the longest of eight mixed step counts."""
        steps = [max(rng.choices(MIXED_STEPS, k=MAX_BATCH)) for _ in range(batches)]
        return MAX_BATCH / mean(
            [await asyncio.to_thread(self.draw_static, range(MAX_BATCH), longest) for longest in steps]
        )

    async def open(self, plan: Sequence[Mixed]) -> dict[str, list[float]]:
        """Return the seconds of requests at the same arrivals in static batches, and then by the suite."""
        server: StaticServer[Mixed] = StaticServer(
            lambda members: self.draw_static([each.number for each in members], max(each.steps for each in members))
        )

        async def static(request: Mixed) -> Result:
            await server.draw(request)
            return Result()

        async def through(request: Mixed) -> Result:
            await self.draw(request.number, request.steps)
            return Result()

        try:
            static_s = (await replay(plan, static, deadline_s=_DEADLINE_S)).took_s()
        finally:
            await server.stop()
        return {"static": static_s, "suite": (await replay(plan, through, deadline_s=_DEADLINE_S)).took_s()}


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Start all sides, and run both loops."""
    with (
        Side(stock, threads=options.threads, model=folder_of(options.model)) as reference,
        plain_suite(options.model, options.threads, folder / "suite") as gateway,
    ):
        asyncio.run(_measure(reference, gateway.address, options, sheet))


async def _measure(reference: Side, address: str, options: argparse.Namespace, sheet: Sheet) -> None:
    rates, seconds = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    async with BareEngine.running(options.model, options.threads) as engine, AsyncClient(address) as client:
        (model,) = await client.models()
        sides = Sides(reference=reference, engine=engine, client=client, model=model)
        await sides.closed(CLIENTS)  # warms all sides up
        for _ in range(options.rounds):
            for name, per_s in (await sides.closed(options.closed_requests)).items():
                rates[name].append(per_s)
        rng = random.Random(ARRIVALS_SEED)
        capacity = await sides.static_capacity(rng, options.capacity_batches)
        share = options.requests // options.rounds
        for _ in range(options.rounds):
            steps = rng.choices(MIXED_STEPS, k=share)
            times = poisson(LOAD * capacity, share, rng)
            plan = [Mixed(number=number, at_s=at_s, steps=steps[number]) for number, at_s in enumerate(times)]
            for name, took_s in (await sides.open(plan)).items():
                seconds[name] += took_s
    rate, p50 = medians(rates), medians(seconds)
    sheet.name_model(options.model)
    p95 = {name: percentile(took_s, 0.95) for name, took_s in seconds.items()}
    sheet.row("Diffusers, one at a time", f"{rate['plain']:.2f} images/s")
    sheet.row("the bare engine, 8 at once", f"{rate['engine']:.2f} images/s")
    sheet.row("the suite, 8 clients", f"{rate['suite']:.2f} images/s")
    ratio, gain = rate["suite"] / rate["plain"], rate["engine"] / rate["plain"]
    sheet.figure("suite over Diffusers", ratio, key="throughput_ratio")
    sheet.figure("of the bare engine's gain", ratio / gain, key="of_engine_gain", bar="at least 0.9")
    sheet.figure("static batches, capacity", capacity, "{:.2f} images/s", key="static_capacity_per_s")
    sheet.row("p50, static batches and suite", f"{p50['static']:.2f} s, {p50['suite']:.2f} s")
    sheet.row("p95, static batches and suite", f"{p95['static']:.2f} s, {p95['suite']:.2f} s")
    ratio = p95["static"] / p95["suite"]
    sheet.figure("static p95 over ours", ratio, key="static_p95_ratio", bar="at least 1.2")
    sheet.values |= {
        "engine_gain": gain,
        "static_p50_ratio": p50["static"] / p50["suite"],
        "requests": len(seconds["suite"]),
        "threads": options.threads,
    }


def _spec(model: ServedModel, seed: int) -> GenerationSpec:
    """Return what the gateway would send for the same request: every default filled in."""
    assert model.default_sampler is not None
    return GenerationSpec(
        model=model.name,
        prompt=PROMPT,
        num_inference_steps=CLOSED_STEPS,
        guidance_scale=GUIDANCE_SCALE,
        guidance_rescale=0.0,
        width=model.default_width,
        height=model.default_height,
        seed=seed,
        num_images=1,
        sampler=SAMPLERS[model.default_sampler],
    )


if __name__ == "__main__":
    sys.exit(BENCH.command())
