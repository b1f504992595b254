"""What does one tenant feel of another that floods or asks for large pictures, and what do tenants get by weight?

The whole suite, one worker. First alone, then beside a tenant that sends twenty times as much, by turns: the same
requests of the first tenant at the same random times. Then two tenants of weights 3 and 1 always have more waiting than
can be drawn, and what is drawn of each is counted. Then the same two questions of seconds, with a heavy tenant whose
pictures are 16 times as large (plain ones, edits, and ones with a ControlNet) and a light one, of equal weight. Seconds
are those of the traces: the turns, the encoding and the decoding of each job, by the engine's own clock. So they do not
depend on what the scheduler counts.

- `victim_p95_ratio`: the p95 of the first tenant's requests beside the flood, over alone.
- `share_error`: how far off its share by weight a tenant is at most, of all pictures that were drawn.
- `seconds_share_error`: how far two saturated tenants of equal weight are from half of the worker's seconds, over that
  half; one asks for large pictures, edits and ControlNets, one for small pictures.
- `light_p95_ratio`: the p95 of the tenant of small pictures beside the saturated one over alone, where it asks for a
  tenth of the worker's seconds, at random times.

A run takes 20 to 40 minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import PIL.Image

from bottega.client import AsyncClient, AsyncJob, Box, Client, ControlNet
from bottega.client.transport.credentials import KEY_VARIABLE
from bottega.client.types.jobs import TraceSpan
from bottega.errors import BottegaError, ControlNetNotFound, JobCancelled, NoControlNet, QueueFull
from bottega.miniature import WEIGHTS as MINIATURE
from bottega.rpc.security.api_keys import new_key
from bottega.rpc.security.tenant_file import Tenant, change_tenants
from load.bench.framework import PROMPT, Bench, Option, Sheet, percentile
from load.bench.suites import pinned, plain_suite
from load.bench.typical_arrivals import typical_arrivals
from load.replay.arrivals import poisson
from load.replay.driver import replay
from load.replay.results import Result
from tests.support.services import FREE_PORTS, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

LIGHT: Mapping[str, Any] = {"num_inference_steps": 30}
# Of what the worker draws a second, what the first tenant asks for; the other asks for so many times as much.
LOAD, FLOOD = 0.2, 20.0
WEIGHTS: Mapping[str, float] = {"three": 3.0, "one": 1.0}
WANTED_RATIO, WANTED_SHARE_ERROR = 1.3, 0.05
TIMEOUT_S, JOIN_S = 600.0, 120.0
# Pixels a side of the heavy tenant's pictures; the embedded model's own size is 64.
SIZE, HEAVY_STEPS = 256, 10
# Seconds of the worker that the light tenant asks for, of all there are.
LIGHT_LOAD = 0.1
TENANTS = ("heavy", "light")
# Pictures by which a worker's speed is measured.
_CALIBRATION, _HEAVY_CALIBRATION = 20, 5
# Seconds of a flood or of saturation before anything is counted.
_SETTLING_S = 5.0
# Jobs of each saturated tenant that always wait or run.
_WAITING = 8
_MAX_QUEUED = 100_000
# The tracks of a trace in which the worker's device is busy.
_BUSY = frozenset({"encode", "denoise", "decode"})
_GROUP = "requests in the batch"
BENCH = Bench(
    __file__,
    __doc__,
    Option("--requests", 40, "of the first tenant, of each round", smallest=3),
    Option("--rounds", 3, "alone and beside the other", smallest=1),
    Option("--pictures", 200, "that are drawn for shares", smallest=8),
    Option("--seconds", 120.0, "of shares of seconds", smallest=2.0),
    Option("--only", "", "one part of it", choices=("equal", "heavy")),
)

Connect = Callable[[str], AsyncClient]
"""Makes a client of the tenant of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request of the first tenant, and when it comes."""

    at_s: float


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure tenants that ask for the same, and one of large pictures, which has a report of its own."""
    if options.only in ("", "equal"):
        with _suite(folder) as connect:
            asyncio.run(_flooded(connect, options, sheet))
            asyncio.run(_shares_by_weight(connect, options.pictures, sheet))
    if options.only in ("", "heavy"):
        heavy = Sheet("fairness-heavy")
        sheet.parts.append(heavy)
        with _heavy_suite(folder / "heavy") as connect:
            asyncio.run(_light_beside_heavy(connect, options, heavy))
            asyncio.run(_shares_of_seconds(connect, options.seconds, heavy))


@contextmanager
def _suite(folder: Path) -> Iterator[Connect]:
    """Run a gateway with a worker of one thread."""
    keys, settings = _tenants(folder / "tenants.json", {"steady": 1.0, "flood": 1.0, **WEIGHTS})
    with (
        mock.patch.dict(os.environ, {KEY_VARIABLE: keys["steady"]}),  # to wait for the worker with
        plain_suite("miniature", 1, folder / "suite", **settings) as gateway,
    ):
        yield lambda name: AsyncClient(gateway.address, api_key=keys[name], timeout_s=TIMEOUT_S)


@contextmanager
def _heavy_suite(folder: Path) -> Iterator[Connect]:
    """Run a gateway, a worker and a ControlNet server, the latter two with a core and a thread each."""
    folder.mkdir(parents=True)
    keys, settings = _tenants(folder / "tenants.json", dict.fromkeys(TENANTS, 1.0))
    with Services(folder) as services:
        gateway = services.start("gateway", gateway_config(traces_bytes=256 << 20, **settings))
        server = {
            "name": "server",
            "gateway": gateway.fleet,
            "server": FREE_PORTS,
            "engine": {"threads": 1},
            "controlnets": {"edges": str(MINIATURE / "controlnets" / "edges")},
        }
        with pinned(1):
            services.start("controlnet", server)
        with pinned(0):
            engine = {"model": "miniature", "threads": 1}
            services.start("worker", worker_config(gateway.fleet, name="worker", engine=engine))
        with Client(gateway.address, api_key=keys["light"]) as client:
            wait_until(lambda: bool(client.models()), "the worker to join", within_s=JOIN_S)
            wait_until(lambda: _drawable(client), "the ControlNet server to join", within_s=JOIN_S)
        yield lambda name: AsyncClient(gateway.address, api_key=keys[name], timeout_s=TIMEOUT_S)


def _tenants(file: Path, weights: Mapping[str, float]) -> tuple[Mapping[str, str], dict[str, Any]]:
    """Write the tenants of these weights; return the key of each and the settings of a gateway that knows them."""
    keys = dict[str, str]()
    for name, weight in weights.items():
        keys[name], parts = new_key()
        tenant = Tenant(name=name, weight=weight).rotated(parts, keep_old=False)
        change_tenants(file, lambda tenants, tenant=tenant: (*tenants, tenant))  # type: ignore[misc]
    return keys, {"tenants": str(file), "max_queued": _MAX_QUEUED}


def _drawable(client: Client) -> bool:
    """Return whether a picture with the ControlNet is drawn."""
    try:
        client.generate(PROMPT, **{**_heavy_kinds()[-1], "num_inference_steps": 1})
    except (ControlNetNotFound, NoControlNet):
        return False
    return True


def _heavy_kinds() -> Sequence[Mapping[str, Any]]:
    """Return options of the heavy tenant's requests, one after the other."""
    file = io.BytesIO()
    PIL.Image.radial_gradient("L").resize((SIZE, SIZE)).convert("RGB").save(file, "PNG")
    image = file.getvalue()
    size: Mapping[str, Any] = {"width": SIZE, "height": SIZE, "num_inference_steps": HEAVY_STEPS}
    return (
        size,
        {**size, "image": image, "mask_image": Box(32, 32, 160, 160), "strength": 1.0},
        {**size, "controlnets": [ControlNet("edges", image)]},
    )


async def _flooded(connect: Connect, options: argparse.Namespace, sheet: Sheet) -> None:
    """Measure what the first tenant feels of a flood."""
    sent: Counter[str] = Counter()
    async with connect("steady") as steady, connect("flood") as flood:
        per_s = 1.0 / await _picture_s(steady, _CALIBRATION)
        took_s = await _by_turns(
            steady,
            {"alone": contextlib.nullcontext, "flooded": lambda: _flood(flood, FLOOD * LOAD * per_s, sent)},
            options,
            load=LOAD,
            per_s=per_s,
        )
    ratio = _add_percentiles(sheet, took_s, "")
    what, bar = "p95 beside the flood over alone", f"at most {WANTED_RATIO}"
    sheet.figure(what, ratio, key="victim_p95_ratio", bar=bar)
    sheet.values |= {"flood_sent": sent["sent"], "flood_refused": sent["refused"]}


async def _shares_by_weight(connect: Connect, pictures: int, sheet: Sheet) -> None:
    """Count the pictures of two saturated tenants."""
    drawn: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(connect(name)) for name in WEIGHTS}
        enough = asyncio.Event()

        async def ask(name: str) -> None:
            while not enough.is_set():
                await clients[name].generate(PROMPT, **LIGHT)
                drawn.append(name)
                if len(drawn) >= _WAITING + pictures:
                    enough.set()

        asking = [asyncio.create_task(ask(name)) for name in WEIGHTS for _ in range(_WAITING)]
        await enough.wait()
        await _cancelled(asking)
    counted = Counter(drawn[_WAITING : _WAITING + pictures])  # before those, not all of both were here
    expected = {name: weight / sum(WEIGHTS.values()) * pictures for name, weight in WEIGHTS.items()}
    error = max(abs(counted[name] / expected[name] - 1.0) for name in WEIGHTS)
    of = ", ".join(f"{counted[name]} of weight {weight:g}" for name, weight in WEIGHTS.items())
    bar = f"at most {WANTED_SHARE_ERROR:.0%}"
    sheet.figure(f"off the shares by weight: {of}", error, "{:.1%}", key="share_error", bar=bar)


async def _light_beside_heavy(connect: Connect, options: argparse.Namespace, sheet: Sheet) -> None:
    """Measure what the light tenant's requests take alone, and at the same times beside the saturated heavy tenant."""
    late: Counter[str] = Counter()
    async with connect("light") as light, connect("heavy") as heavy:
        per_s = 1.0 / await _picture_s(light, _HEAVY_CALIBRATION)
        took_s = await _by_turns(
            light,
            {"alone": contextlib.nullcontext, "beside": lambda: _saturated(heavy)},
            options,
            load=LIGHT_LOAD,
            per_s=per_s,
            late=late,
        )
    ratio = _add_percentiles(sheet, took_s, "light")
    what, bar = "p95 beside pictures of 16 times the pixels over alone", f"at most {WANTED_RATIO}"
    sheet.figure(what, ratio, key="light_p95_ratio", bar=bar)
    sheet.values["light_sent_late"] = late.total()


async def _shares_of_seconds(connect: Connect, seconds: float, sheet: Sheet) -> None:
    """Measure what each of two saturated tenants gets in so many seconds."""
    async with contextlib.AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(connect(name)) for name in TENANTS}
        done: dict[str, list[tuple[float, AsyncJob]]] = {name: [] for name in TENANTS}
        options = {"heavy": itertools.cycle(_heavy_kinds()), "light": itertools.repeat(LIGHT)}
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
        sheet.values |= {f"{name}_pictures": len(done[name]) for name in TENANTS}
        ended.set()
        await asyncio.gather(*asking)  # what runs at the end of the time has its trace only when it is done
        busy_s = {
            name: sum([await _busy_s(job, began_s, begin_s, end_s) for began_s, job in done[name]]) for name in TENANTS
        }
    shares = {name: busy_s[name] / sum(busy_s.values()) for name in TENANTS}
    of = ", ".join(f"{share:.1%} {name}" for name, share in shares.items())
    error, bar = abs(shares["light"] / 0.5 - 1.0), f"at most {WANTED_SHARE_ERROR:.0%}"
    what = f"off half of the worker's seconds: {of}"
    sheet.figure(what, error, "{:.1%}", key="seconds_share_error", bar=bar)
    sheet.values["light_share_of_seconds"] = shares["light"]


async def _by_turns(
    client: AsyncClient,
    sides: Mapping[str, Callable[[], contextlib.AbstractAsyncContextManager[None]]],
    options: argparse.Namespace,
    *,
    load: float,
    per_s: float,
    late: Counter[str] | None = None,
) -> dict[str, list[float]]:
    """Send the same requests of a tenant in each side's block; return their latencies.

    Args:
        load: Share of the worker's pictures a second that the tenant asks for.
        late: Counts requests that went out late, as on a machine that others use as well; without it they end the run.
    """
    took_s: dict[str, list[float]] = {side: [] for side in sides}

    async def send(_: Call) -> Result:
        await client.generate(PROMPT, **LIGHT)
        return Result()

    for number in range(options.rounds):
        times = typical_arrivals(load * per_s, options.requests, capacity_per_s=per_s, seed=str(number))
        calls = [Call(at_s=at_s) for at_s in times]
        for side in list(sides)[:: -1 if number % 2 else 1]:
            async with sides[side]():
                run = await replay(calls, send, deadline_s=TIMEOUT_S)
            if late is None:
                took_s[side] += run.took_s()
            else:
                late[side] += sum(not answer.on_time for answer in run.answers)
                took_s[side] += [answer.latency_s for answer in run.answers]
    return took_s


@contextlib.asynccontextmanager
async def _flood(client: AsyncClient, per_s: float, sent: Counter[str]) -> AsyncIterator[None]:
    """Send jobs at random until the block ends, whether or not those before are done; then cancel all.

    Nobody waits for them: that one process follows hundreds of streams is not what is measured.
    """
    jobs: list[AsyncJob] = []

    async def send() -> None:
        began = time.monotonic()
        for at_s in poisson(per_s, _MAX_QUEUED, random.Random("flood")):
            await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
            try:
                jobs.append(await client.submit(PROMPT, **LIGHT))
            except QueueFull:
                sent["refused"] += 1

    sending = asyncio.create_task(send())
    await asyncio.sleep(_SETTLING_S)
    try:
        yield
    finally:
        await _cancelled([sending])
        sent["sent"] += len(jobs)
        for job in reversed(jobs):  # the newest first: those that wait make no room for others
            await job.cancel()
        await client.generate(PROMPT, **LIGHT)  # what was cancelled ends with the turn that it is in


@contextlib.asynccontextmanager
async def _saturated(client: AsyncClient) -> AsyncIterator[None]:
    """Let the heavy tenant always have more waiting than can be drawn, until the block ends."""
    options, jobs = itertools.cycle(_heavy_kinds()), set[AsyncJob]()

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
        await _cancelled(asking)
        for job in jobs:
            await job.cancel()
        await client.generate(PROMPT)  # what was cancelled ends with the turn that it is in


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks, and raise what else than an error of the suite ended them."""
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception) and not isinstance(ended, BottegaError):
            raise ended


async def _picture_s(client: AsyncClient, count: int) -> float:
    """Return the seconds of a picture, one after the other; the first one pays for what is made once."""
    await client.generate(PROMPT, **LIGHT)
    began_s = time.perf_counter()
    for _ in range(count):
        await client.generate(PROMPT, **LIGHT)
    return (time.perf_counter() - began_s) / count


async def _busy_s(job: AsyncJob, began_s: float, begin_s: float, end_s: float) -> float:
    """Return the seconds within [begin_s, end_s] in which the device was busy with a job that began at `began_s`."""
    trace = await job.trace()
    spans = [span for span in trace.spans if span.track in _BUSY and span.service == "worker"]
    return sum(_within(span, began_s, begin_s, end_s) / int(span.facts.get(_GROUP, "1")) for span in spans)


def _within(span: TraceSpan, began_s: float, begin_s: float, end_s: float) -> float:
    return max(0.0, min(began_s + span.end_s, end_s) - max(began_s + span.begin_s, begin_s))


def _add_percentiles(sheet: Sheet, took_s: Mapping[str, Sequence[float]], who: str) -> float:
    """Report both sides' seconds; return the p95 of the second side over that of the first."""
    label, key = (f"{who}, ", f"{who}_") if who else ("", "")
    p95 = {name: percentile(seconds, 0.95) for name, seconds in took_s.items()}
    for name, seconds in took_s.items():
        sheet.row(f"{label}{name}: p50, p95", f"{median(seconds):.3f} s, {p95[name]:.3f} s")
        sheet.values |= {f"{key}{name}_p50_s": median(seconds), f"{key}{name}_p95_s": p95[name]}
    alone, beside = p95.values()
    return beside / alone


if __name__ == "__main__":
    sys.exit(BENCH.command())
