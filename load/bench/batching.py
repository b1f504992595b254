"""What joining and leaving the batch at every step gains, on the embedded model.

Closed loop: eight clients, in images per second, against Diffusers one at a time and against the bare engine.
Open loop: the same Poisson arrivals, at .7 of the measured capacity of static batches, with 20, 30 and 50 steps
mixed, for the suite and for static batches; p95 of the time from the intended arrival to the picture.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from bottega.client import AsyncClient
from bottega.miniature import WEIGHTS
from bottega.v1.generation_pb2 import SAMPLER_EULER, GenerationSpec
from load.bench import bare_engine, suite
from load.bench.bare_engine import BareEngine
from load.bench.closed_loop import closed_loop
from load.bench.reference import Batch, Reference
from load.bench.report import percentile, report
from load.bench.scratch import scratch
from load.bench.static_batches import MAX_BATCH, StaticServer
from load.replay.arrivals import poisson
from load.replay.driver import replay
from load.replay.results import Result

PROMPT = "a big red star on the left on a blue background"
GUIDANCE_SCALE = 5.0
CLIENTS = 8
CLOSED_STEPS = 20
MIXED_STEPS = (20, 30, 50)
LOAD = 0.7
# A seed makes a run repeatable; which one does not matter.
ARRIVALS_SEED = 8
_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A request of the open loop. number: from 0, its seed. at_s: when it is meant to come."""

    number: int
    at_s: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Who draws: all of them live through the whole run, one of them at a time has something to do."""

    reference: Reference
    engine: BareEngine
    client: AsyncClient


@dataclass(slots=True, kw_only=True)
class Measured:
    """Rates in images per second, one for each round; times in seconds, one for each request."""

    plain: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    suite: list[float] = field(default_factory=list)
    static_capacity: float = 0.0
    static_s: list[float] = field(default_factory=list)
    suite_s: list[float] = field(default_factory=list)


async def measure(sides: Sides, options: argparse.Namespace) -> Measured:
    """Runs both loops, `options.rounds` times in turns."""
    measured = Measured()
    await _closed(sides, CLIENTS)  # warms all sides up
    for _ in range(options.rounds):
        plain, engine, through = await _closed(sides, options.closed_requests)
        measured.plain.append(plain)
        measured.engine.append(engine)
        measured.suite.append(through)
    rng = random.Random(ARRIVALS_SEED)
    measured.static_capacity = await _static_capacity(sides.reference, rng, options.capacity_batches)
    share = options.requests // options.rounds
    for _ in range(options.rounds):
        await _open(sides, measured, share, rng)
    return measured


async def _closed(sides: Sides, requests: int) -> tuple[float, float, float]:
    """Images per second of: Diffusers one at a time, the bare engine, the suite."""

    async def plain(number: int) -> None:
        batch = Batch(prompts=(PROMPT,), seeds=(number,), steps=CLOSED_STEPS, guidance_scale=GUIDANCE_SCALE)
        await asyncio.to_thread(sides.reference.draw, batch)

    async def alone(number: int) -> None:
        await sides.engine.draw(_spec(CLOSED_STEPS, number))

    async def through(number: int) -> None:
        await _through(sides.client, CLOSED_STEPS, number)

    return (
        await closed_loop(plain, requests=requests, clients=1),
        await closed_loop(alone, requests=requests, clients=CLIENTS),
        await closed_loop(through, requests=requests, clients=CLIENTS),
    )


async def _static_capacity(reference: Reference, rng: random.Random, batches: int) -> float:
    """Images per second of full static batches, each run to the longest of eight mixed step counts."""
    seconds = []
    for _ in range(batches):
        steps = max(rng.choices(MIXED_STEPS, k=MAX_BATCH))
        batch = Batch(
            prompts=(PROMPT,) * MAX_BATCH, seeds=tuple(range(MAX_BATCH)), steps=steps, guidance_scale=GUIDANCE_SCALE
        )
        seconds.append(await asyncio.to_thread(reference.draw, batch))
    return MAX_BATCH / mean(seconds)


async def _open(sides: Sides, measured: Measured, requests: int, rng: random.Random) -> None:
    """The same arrivals for static batches and then for the suite."""
    steps = rng.choices(MIXED_STEPS, k=requests)
    times = poisson(LOAD * measured.static_capacity, requests, rng)
    plan = [Mixed(number=number, at_s=at_s, steps=steps[number]) for number, at_s in enumerate(times)]

    async def static(request: Mixed) -> Result:
        await server.draw(request)
        return Result()

    async def through(request: Mixed) -> Result:
        await _through(sides.client, request.steps, request.number)
        return Result()

    server: StaticServer[Mixed] = StaticServer(lambda members: _draw_static(sides.reference, members))
    try:
        measured.static_s += (await replay(plan, static, deadline_s=_DEADLINE_S)).took_s()
    finally:
        await server.stop()
    measured.suite_s += (await replay(plan, through, deadline_s=_DEADLINE_S)).took_s()


def _draw_static(reference: Reference, members: Sequence[Mixed]) -> None:
    """To the longest of their steps."""
    batch = Batch(
        prompts=(PROMPT,) * len(members),
        seeds=tuple(member.number for member in members),
        steps=max(member.steps for member in members),
        guidance_scale=GUIDANCE_SCALE,
    )
    reference.draw(batch)


async def _through(client: AsyncClient, steps: int, seed: int) -> None:
    await client.generate(PROMPT, seed=seed, num_inference_steps=steps, guidance_scale=GUIDANCE_SCALE)


def _spec(steps: int, seed: int) -> GenerationSpec:
    """What the gateway would send for the same request: every default filled in."""
    return GenerationSpec(
        model="miniature",
        prompt=PROMPT,
        num_inference_steps=steps,
        guidance_scale=GUIDANCE_SCALE,
        guidance_rescale=0.0,
        width=64,
        height=64,
        seed=seed,
        num_images=1,
        sampler=SAMPLER_EULER,
    )


def _report(measured: Measured, options: argparse.Namespace) -> None:
    throughput_ratio = median(measured.suite) / median(measured.plain)
    engine_gain = median(measured.engine) / median(measured.plain)
    static_p95, suite_p95 = percentile(measured.static_s, 0.95), percentile(measured.suite_s, 0.95)
    values = {
        "throughput_ratio": throughput_ratio,
        "of_engine_gain": throughput_ratio / engine_gain,
        "static_p95_ratio": static_p95 / suite_p95,
        "engine_gain": engine_gain,
        "static_capacity_per_s": measured.static_capacity,
        "static_p50_ratio": median(measured.static_s) / median(measured.suite_s),
        "requests": len(measured.suite_s),
        "threads": options.threads,
    }
    rows = [
        ("Diffusers, one at a time", f"{median(measured.plain):.2f} images/s", ""),
        ("the bare engine, 8 at once", f"{median(measured.engine):.2f} images/s", ""),
        ("the suite, 8 clients", f"{median(measured.suite):.2f} images/s", ""),
        ("suite over Diffusers (throughput_ratio)", f"{throughput_ratio:.2f}", ""),
        ("of the bare engine's gain (of_engine_gain)", f"{values['of_engine_gain']:.2f}", "at least 0.9"),
        ("static batches, capacity", f"{measured.static_capacity:.2f} images/s", ""),
        ("p50, static batches and suite", f"{median(measured.static_s):.2f} s, {median(measured.suite_s):.2f} s", ""),
        ("p95, static batches and suite", f"{static_p95:.2f} s, {suite_p95:.2f} s", ""),
        ("static p95 over ours (static_p95_ratio)", f"{static_p95 / suite_p95:.2f}", "at least 1.2"),
    ]
    report("batching", rows, values)


async def _run(options: argparse.Namespace, folder: Path) -> Measured:
    threads = options.threads
    with Reference(WEIGHTS, threads) as reference, suite.running("miniature", threads, folder / "suite") as address:
        async with bare_engine.running("miniature", threads) as engine, AsyncClient(address) as client:
            return await measure(Sides(reference=reference, engine=engine, client=client), options)


def main() -> None:
    """Measures and reports."""
    options = _options()
    with scratch() as folder:
        measured = asyncio.run(_run(options, folder))
    _report(measured, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300, help="of the open loop, on each side")
    parser.add_argument("--closed-requests", type=int, default=32, help="of a round of the closed loop")
    parser.add_argument("--capacity-batches", type=int, default=6, help="to measure the capacity of static batches")
    parser.add_argument("--rounds", type=int, default=3, help="in which the sides take turns")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch, on each side")
    return parser.parse_args()


if __name__ == "__main__":
    main()
