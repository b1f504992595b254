"""What one tenant feels of another that floods, and what tenants of different weight get: the whole suite, one worker.

Alone, then beside a tenant that sends twenty times as much, by turns: the same requests of the first tenant at the same
random times. Then two tenants of weights 3 and 1 always have more waiting than can be drawn, and what is drawn of each
is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from unittest import mock

from bottega.client import AsyncClient, AsyncJob
from bottega.client.transport.access import KEY_VARIABLE
from bottega.errors import BottegaError, QueueFull
from bottega.rpc.security.api_keys import new_key
from bottega.rpc.security.tenant_file import Tenant, change_tenants
from load.bench.report import percentile, report
from load.bench.scratch import scratch
from load.bench.suite import running_gateway
from load.bench.typical_arrivals import typical_arrivals
from load.replay.arrivals import poisson
from load.replay.driver import replay
from load.replay.results import Result

PROMPT = "a big red star on the left on a blue background"
STEPS = 30
# Of what the worker draws a second, what the first tenant asks for; the other asks for so many times as much.
LOAD, FLOOD = 0.2, 20.0
WEIGHTS: Mapping[str, float] = {"three": 3.0, "one": 1.0}
WANTED_RATIO, WANTED_SHARE_ERROR = 1.3, 0.05
TIMEOUT_S = 600.0
_CALIBRATION = 20
# Of the flood, before the first tenant's requests are counted; of each tenant that always has more waiting.
_FLOODED_S, _WAITING = 5.0, 8
_MAX_QUEUED = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request of the first tenant. at_s: when it comes."""

    at_s: float


@dataclass(slots=True, kw_only=True)
class Felt:
    """Seconds that the first tenant's requests took, by side. sent: of the other's; refused: turned away."""

    took_s: dict[str, list[float]] = field(default_factory=lambda: {"alone": [], "flooded": []})
    sent: int = 0
    refused: int = 0

    @property
    def ratio(self) -> float:
        """Of p95, beside the flood over alone."""
        return percentile(self.took_s["flooded"], 0.95) / percentile(self.took_s["alone"], 0.95)


@contextmanager
def suite(folder: Path) -> Iterator[Callable[[str], AsyncClient]]:
    """A gateway with a worker of one thread, and what makes a client of the tenant of a name."""
    file, keys = folder / "tenants.json", dict[str, str]()
    for name, weight in {"steady": 1.0, "flood": 1.0, **WEIGHTS}.items():
        keys[name], parts = new_key()
        tenant = Tenant(name=name, weight=weight).rotated(parts, keep_old=False)
        change_tenants(file, lambda tenants, tenant=tenant: (*tenants, tenant))  # type: ignore[misc]
    with (
        mock.patch.dict(os.environ, {KEY_VARIABLE: keys["steady"]}),  # for who waits until the worker is here
        running_gateway("miniature", 1, folder / "suite", tenants=str(file), max_queued=_MAX_QUEUED) as gateway,
    ):
        yield lambda name: AsyncClient(gateway.address, api_key=keys[name], timeout_s=TIMEOUT_S)


async def felt(connect: Callable[[str], AsyncClient], options: argparse.Namespace) -> Felt:
    """What the first tenant feels of the other, over all rounds."""
    found = Felt()
    async with connect("steady") as steady, connect("flood") as flood:
        per_s = await _calibrated(steady)
        for number in range(options.rounds):
            times = typical_arrivals(LOAD * per_s, options.requests, capacity_per_s=per_s, seed=str(number))
            calls = [Call(at_s=at_s) for at_s in times]
            for side in ("alone", "flooded")[:: -1 if number % 2 else 1]:
                async with (
                    _flood(flood, FLOOD * LOAD * per_s, found) if side == "flooded" else contextlib.nullcontext()
                ):
                    run = await replay(calls, _sender(steady), deadline_s=TIMEOUT_S)
                found.took_s[side] += run.took_s()
    return found


async def share_error(connect: Callable[[str], AsyncClient], pictures: int) -> tuple[float, Counter[str]]:
    """How far off its share by weight a tenant is at most, relatively, and what was drawn of each, of so many."""
    drawn: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(connect(name)) for name in WEIGHTS}
        enough = asyncio.Event()

        async def ask(name: str) -> None:
            while not enough.is_set():
                await clients[name].generate(PROMPT, num_inference_steps=STEPS)
                drawn.append(name)
                if len(drawn) >= _WAITING + pictures:
                    enough.set()

        asking = [asyncio.create_task(ask(name)) for name in WEIGHTS for _ in range(_WAITING)]
        await enough.wait()
        await _ended(asking)
    counted = Counter(drawn[_WAITING : _WAITING + pictures])  # before those, not all of both were here
    expected = {name: weight / sum(WEIGHTS.values()) * pictures for name, weight in WEIGHTS.items()}
    return max(abs(counted[name] / expected[name] - 1.0) for name in WEIGHTS), counted


async def _calibrated(client: AsyncClient) -> float:
    """Pictures a second, one after the other; pays for what is made once."""
    await client.generate(PROMPT, num_inference_steps=STEPS)
    began = time.perf_counter()
    for _ in range(_CALIBRATION):
        await client.generate(PROMPT, num_inference_steps=STEPS)
    return _CALIBRATION / (time.perf_counter() - began)


@contextlib.asynccontextmanager
async def _flood(client: AsyncClient, per_s: float, found: Felt) -> AsyncIterator[None]:
    """Jobs at random, whether or not those before are done, until the block ends; then all are cancelled.

    Nobody waits for them: that one process follows hundreds of streams is not what is measured.
    """
    jobs: list[AsyncJob] = []

    async def send() -> None:
        began = time.monotonic()
        for at_s in poisson(per_s, _MAX_QUEUED, random.Random("flood")):
            await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
            try:
                jobs.append(await client.submit(PROMPT, num_inference_steps=STEPS))
            except QueueFull:
                found.refused += 1

    sending = asyncio.create_task(send())
    await asyncio.sleep(_FLOODED_S)
    try:
        yield
    finally:
        await _ended([sending])
        found.sent += len(jobs)
        for job in reversed(jobs):  # the newest first: those that wait make no room for others
            await job.cancel()
        await _idle(client)


async def _idle(client: AsyncClient) -> None:
    """Returns when nothing is drawn any more: what was cancelled ends with the turn that it is in."""
    await client.generate(PROMPT, num_inference_steps=STEPS)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception) and not isinstance(ended, BottegaError):
            raise ended


def _sender(client: AsyncClient) -> Callable[[Call], Awaitable[Result]]:
    async def send(call: Call) -> Result:
        del call
        await client.generate(PROMPT, num_inference_steps=STEPS)
        return Result()

    return send


def main() -> None:
    """Prints the table and the line of JSON."""
    options = _options()
    with scratch() as folder, suite(folder) as connect:
        found = asyncio.run(felt(connect, options))
        error, drawn = asyncio.run(share_error(connect, options.pictures))
    values = {
        "victim_p95_ratio": found.ratio,
        "share_error": error,
        **{f"{name}_p50_s": median(took_s) for name, took_s in found.took_s.items()},
        **{f"{name}_p95_s": percentile(took_s, 0.95) for name, took_s in found.took_s.items()},
        "flood_sent": float(found.sent),
        "flood_refused": float(found.refused),
    }
    rows = [
        (f"{name}: p50, p95", f"{values[f'{name}_p50_s']:.3f} s, {values[f'{name}_p95_s']:.3f} s", "")
        for name in found.took_s
    ]
    rows.append(("p95 beside the flood over alone (victim_p95_ratio)", f"{found.ratio:.2f}", f"<= {WANTED_RATIO}"))
    of = ", ".join(f"{drawn[name]} of weight {weight:g}" for name, weight in WEIGHTS.items())
    rows.append((f"off the shares by weight: {of} (share_error)", f"{error:.1%}", f"<= {WANTED_SHARE_ERROR:.0%}"))
    report("fairness", rows, values)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-fairness", description=__doc__)
    parser.add_argument("--requests", type=int, default=40, help="of the first tenant, of each round (default: 40)")
    parser.add_argument("--rounds", type=int, default=3, help="alone and beside the flood (default: 3)")
    parser.add_argument("--pictures", type=int, default=200, help="that are drawn for shares (default: 200)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
