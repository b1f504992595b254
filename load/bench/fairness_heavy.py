"""Shares of a worker's seconds between a tenant of large pictures and one of small ones, both of equal weight.

The heavy tenant asks for pictures of 16 times the pixels: plain ones, edits, and ones with a ControlNet. Seconds are
those of the traces: the turns, the encoding and the decoding of each job, by the engine's own clock. So they do not
depend on what the scheduler counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import PIL.Image

from bottega.client import AsyncClient, AsyncJob, Box, Client, ControlNet
from bottega.client.types.jobs import TraceSpan
from bottega.errors import BottegaError, ControlNetNotFound, JobCancelled, NoControlNet
from bottega.miniature import WEIGHTS
from load.bench.controlnet_suite import pinned
from load.bench.report import percentile
from load.bench.typical_arrivals import typical_arrivals
from load.replay.driver import replay
from load.replay.results import Result
from tests.support.services import FREE_PORTS, Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

PROMPT = "a big red star on the left on a blue background"
SIZE = 256
"""Pixels a side of the heavy tenant's pictures; the embedded model's own size is 64."""
LIGHT: Mapping[str, Any] = {"num_inference_steps": 30}
HEAVY_STEPS = 10
LIGHT_LOAD = 0.1
"""Seconds of the worker that the light tenant asks for, of all there are."""
TENANTS = ("heavy", "light")
JOIN_S, TIMEOUT_S = 120.0, 600.0
# Jobs of each tenant that always wait or run.
_WAITING = 8
# Before seconds are counted: until all of a saturated worker's jobs are of both tenants.
_SETTLING_S = 5.0
_CALIBRATION = 5
# The tracks of a trace in which the worker's device is busy.
_BUSY = frozenset({"encode", "denoise", "decode"})
_GROUP = "requests in the group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request of the light tenant."""

    at_s: float
    """When it comes."""


@dataclass(slots=True, kw_only=True)
class Tried:
    """What was measured."""

    took_s: dict[str, list[float]] = field(default_factory=lambda: {"alone": [], "beside": []})
    """Seconds that the light tenant's requests took, alone and beside the saturated heavy tenant."""
    shares: dict[str, float] = field(default_factory=dict)
    """Share of the worker's busy seconds while both tenants are saturated, by tenant."""
    pictures: dict[str, int] = field(default_factory=dict)
    """Pictures that were completed in that time, by tenant."""
    sent_late: int = 0
    """Requests of the light tenant that went out later than planned, as on a machine that others use as well."""

    @property
    def ratio(self) -> float:
        """Of the light tenant's p95, beside the heavy tenant over alone."""
        return percentile(self.took_s["beside"], 0.95) / percentile(self.took_s["alone"], 0.95)

    @property
    def share_error(self) -> float:
        """How far a tenant is from half of the seconds, as a share of that half."""
        return abs(self.shares["light"] / 0.5 - 1.0)


@contextmanager
def suite(folder: Path, gateway: Mapping[str, object]) -> Iterator[Service]:
    """A gateway, a worker and a ControlNet server, the latter two with a core and a thread each."""
    folder.mkdir(parents=True)
    with Services(folder) as services:
        served = services.start("gateway", gateway_config(traces_bytes=256 << 20, **gateway))
        with pinned(1):
            services.start(
                "controlnet",
                {
                    "name": "server",
                    "gateway": served.fleet,
                    "server": FREE_PORTS,
                    "engine": {"threads": 1},
                    "controlnets": {"edges": str(WEIGHTS / "controlnets" / "edges")},
                },
            )
        with pinned(0):
            engine = {"model": "miniature", "threads": 1}
            services.start("worker", worker_config(served.fleet, name="worker", engine=engine))
        yield served


def wait_until_joined(client: Client) -> None:
    """Return when the model and the ControlNet can be used."""
    wait_until(lambda: bool(client.models()), "the worker to join", within_s=JOIN_S)
    wait_until(lambda: _drawable(client), "the ControlNet server to join", within_s=JOIN_S)


def _drawable(client: Client) -> bool:
    """Whether a picture with the ControlNet is drawn."""
    try:
        client.generate(PROMPT, **{**heavy_kinds()[-1], "num_inference_steps": 1})
    except (ControlNetNotFound, NoControlNet):
        return False
    return True


def heavy_kinds() -> Sequence[Mapping[str, Any]]:
    """Options of the heavy tenant's requests, one after the other."""
    image = _png(PIL.Image.radial_gradient("L").resize((SIZE, SIZE)).convert("RGB"))
    size: Mapping[str, Any] = {"width": SIZE, "height": SIZE, "num_inference_steps": HEAVY_STEPS}
    return (
        size,
        {**size, "image": image, "mask_image": Box(32, 32, 160, 160), "strength": 1.0},
        {**size, "controlnets": [ControlNet("edges", image)]},
    )


async def shares(connect: Callable[[str], AsyncClient], tried: Tried, *, seconds: float) -> None:
    """Measure what each of two saturated tenants gets in so many seconds."""
    async with contextlib.AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(connect(name)) for name in TENANTS}
        done: dict[str, list[tuple[float, AsyncJob]]] = {name: [] for name in TENANTS}
        options = {"heavy": itertools.cycle(heavy_kinds()), "light": itertools.repeat(LIGHT)}
        ended = asyncio.Event()

        async def ask(name: str) -> None:
            while not ended.is_set():
                job, began_s = await clients[name].submit(PROMPT, **next(options[name])), time.monotonic()
                await job.result()
                done[name].append((began_s, job))

        asking = [asyncio.create_task(ask(name)) for name in TENANTS for _ in range(_WAITING)]
        await asyncio.sleep(_SETTLING_S)
        begin_s = time.monotonic()
        await asyncio.sleep(seconds)
        end_s = time.monotonic()
        tried.pictures = {name: len(done[name]) for name in TENANTS}
        ended.set()
        await asyncio.gather(*asking)  # what runs at the end of the time has its trace only when it is done
        busy_s = {
            name: sum([await _busy_s(job, began_s, begin_s, end_s) for began_s, job in done[name]]) for name in TENANTS
        }
    tried.shares = {name: busy_s[name] / sum(busy_s.values()) for name in TENANTS}
    print(f"shares of seconds: {tried.shares}; pictures: {tried.pictures}", file=sys.stderr, flush=True)


async def light_beside_heavy(
    connect: Callable[[str], AsyncClient], tried: Tried, *, requests: int, rounds: int
) -> None:
    """Measure what the light tenant's requests take alone, and at the same times beside the saturated heavy tenant."""
    async with connect("light") as light, connect("heavy") as heavy:
        alone_s = await _calibrated(light)
        for number in range(rounds):
            rate = LIGHT_LOAD / alone_s
            times = typical_arrivals(rate, requests, capacity_per_s=1.0 / alone_s, seed=str(number))
            calls = [Call(at_s=at_s) for at_s in times]
            for side in ("alone", "beside")[:: -1 if number % 2 else 1]:
                async with saturated(heavy) if side == "beside" else contextlib.nullcontext():
                    run = await replay(calls, _sender(light), deadline_s=TIMEOUT_S)
                tried.sent_late += sum(not answer.on_time for answer in run.answers)
                tried.took_s[side] += [answer.latency_s for answer in run.answers]


@asynccontextmanager
async def saturated(client: AsyncClient) -> AsyncIterator[None]:
    """In the block the heavy tenant always has more waiting than can be drawn."""
    options, jobs = itertools.cycle(heavy_kinds()), set[AsyncJob]()

    async def ask() -> None:
        while True:
            job = await client.submit(PROMPT, **next(options))
            jobs.add(job)
            with contextlib.suppress(JobCancelled):
                await job.result()
            jobs.discard(job)

    asking = [asyncio.create_task(ask()) for _ in range(_WAITING)]
    await asyncio.sleep(_SETTLING_S)
    try:
        yield
    finally:
        for task in asking:
            task.cancel()
        for error in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(error, Exception) and not isinstance(error, BottegaError):
                raise error
        for job in jobs:
            await job.cancel()
        await client.generate(PROMPT)  # what was cancelled ends with the turn that it is in


async def _busy_s(job: AsyncJob, began_s: float, begin_s: float, end_s: float) -> float:
    """Return the seconds within [begin_s, end_s] in which the device was busy with a job that began at `began_s`."""
    trace = await job.trace()
    spans = [span for span in trace.spans if span.track in _BUSY and span.service == "worker"]
    return sum(_within(span, began_s, begin_s, end_s) / int(span.facts.get(_GROUP, "1")) for span in spans)


def _within(span: TraceSpan, began_s: float, begin_s: float, end_s: float) -> float:
    return max(0.0, min(began_s + span.end_s, end_s) - max(began_s + span.begin_s, begin_s))


async def _calibrated(client: AsyncClient) -> float:
    """Return the seconds of one of the light tenant's pictures; pay for what is made once."""
    await client.generate(PROMPT, **LIGHT)
    began_s = time.perf_counter()
    for _ in range(_CALIBRATION):
        await client.generate(PROMPT, **LIGHT)
    return (time.perf_counter() - began_s) / _CALIBRATION


def _sender(client: AsyncClient) -> Callable[[Call], Awaitable[Result]]:
    async def send(call: Call) -> Result:
        del call
        await client.generate(PROMPT, **LIGHT)
        return Result()

    return send


def _png(image: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
