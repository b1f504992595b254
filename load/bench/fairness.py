"""What one tenant feels of another that floods, and what tenants get by weight: the whole suite, one worker.

Alone, then beside a tenant that sends twenty times as much, by turns: the same requests of the first tenant at the same
random times. Then two tenants of weights 3 and 1 always have more waiting than can be drawn, and what is drawn of each
is counted. Then the same two questions of seconds, with a tenant whose pictures are 16 times as large (fairness_heavy).

- `victim_p95_ratio`: the p95 of the first tenant's requests beside the flood, over alone.
- `share_error`: how far off its share by weight a tenant is at most, of all pictures that were drawn.
- `seconds_share_error`: how far two saturated tenants of equal weight are from half of the worker's seconds, over that
  half; one asks for large pictures, edits and ControlNets, one for small pictures.
- `light_p95_ratio`: the p95 of the tenant of small pictures beside the saturated one over alone, where it asks for a
  tenth of the worker's seconds, at random times.
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
from typing import Any
from unittest import mock

from bottega.client import AsyncClient, AsyncJob, Client
from bottega.client.transport.credentials import KEY_VARIABLE
from bottega.errors import BottegaError, QueueFull
from bottega.rpc.security.api_keys import new_key
from bottega.rpc.security.tenant_file import Tenant, change_tenants
from load.bench import fairness_heavy
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
    keys, settings = known_tenants(folder / "tenants.json", {"steady": 1.0, "flood": 1.0, **WEIGHTS})
    with (
        mock.patch.dict(os.environ, {KEY_VARIABLE: keys["steady"]}),  # for who waits until the worker is here
        running_gateway("miniature", 1, folder / "suite", **settings) as gateway,
    ):
        yield lambda name: AsyncClient(gateway.address, api_key=keys[name], timeout_s=TIMEOUT_S)


@contextmanager
def heavy_suite(folder: Path) -> Iterator[Callable[[str], AsyncClient]]:
    """The same with a ControlNet server, and the tenants of fairness_heavy."""
    keys, settings = known_tenants(folder / "heavy.json", dict.fromkeys(fairness_heavy.TENANTS, 1.0))
    with fairness_heavy.suite(folder / "heavy", settings) as gateway:
        with Client(gateway.address, api_key=keys["light"]) as client:
            fairness_heavy.wait_until_joined(client)
        yield lambda name: AsyncClient(gateway.address, api_key=keys[name], timeout_s=TIMEOUT_S)


def known_tenants(file: Path, weights: Mapping[str, float]) -> tuple[Mapping[str, str], dict[str, Any]]:
    """Write the tenants of these weights; return the key of each and the settings of a gateway that knows them."""
    keys = dict[str, str]()
    for name, weight in weights.items():
        keys[name], parts = new_key()
        tenant = Tenant(name=name, weight=weight).rotated(parts, keep_old=False)
        change_tenants(file, lambda tenants, tenant=tenant: (*tenants, tenant))  # type: ignore[misc]
    return keys, {"tenants": str(file), "max_queued": _MAX_QUEUED}


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
    """Print the tables and lines of JSON: of tenants that ask for the same, and of one of large pictures."""
    options = _options()
    with scratch() as folder:
        if options.only in ("", "equal"):
            with suite(folder) as connect:
                found = asyncio.run(felt(connect, options))
                error, drawn = asyncio.run(share_error(connect, options.pictures))
            _report_equal(found, error, drawn)
        if options.only in ("", "heavy"):
            tried = fairness_heavy.Tried()
            with heavy_suite(folder) as connect:
                asyncio.run(fairness_heavy.shares(connect, tried, seconds=options.seconds))
                asyncio.run(
                    fairness_heavy.light_beside_heavy(connect, tried, requests=options.requests, rounds=options.rounds)
                )
            _report_heavy(tried)


def _report_equal(found: Felt, error: float, drawn: Counter[str]) -> None:
    values = {
        "victim_p95_ratio": found.ratio,
        "share_error": error,
        **_percentiles(found.took_s, ""),
        "flood_sent": float(found.sent),
        "flood_refused": float(found.refused),
    }
    rows = _percentile_rows(found.took_s, "")
    rows.append(("p95 beside the flood over alone (victim_p95_ratio)", f"{found.ratio:.2f}", f"at most {WANTED_RATIO}"))
    of = ", ".join(f"{drawn[name]} of weight {weight:g}" for name, weight in WEIGHTS.items())
    rows.append((f"off the shares by weight: {of} (share_error)", f"{error:.1%}", f"at most {WANTED_SHARE_ERROR:.0%}"))
    report("fairness", rows, values)


def _report_heavy(tried: fairness_heavy.Tried) -> None:
    values = {
        "light_p95_ratio": tried.ratio,
        "seconds_share_error": tried.share_error,
        "light_share_of_seconds": tried.shares["light"],
        "light_sent_late": float(tried.sent_late),
        **{f"{name}_pictures": float(count) for name, count in tried.pictures.items()},
        **_percentiles(tried.took_s, "light_"),
    }
    rows = _percentile_rows(tried.took_s, "light, ")
    said = "p95 beside pictures of 16 times the pixels over alone (light_p95_ratio)"
    rows.append((said, f"{tried.ratio:.2f}", f"at most {WANTED_RATIO}"))
    of = ", ".join(f"{tried.shares[name]:.1%} {name}" for name in fairness_heavy.TENANTS)
    said = f"off half of the worker's seconds: {of} (seconds_share_error)"
    rows.append((said, f"{tried.share_error:.1%}", f"at most {WANTED_SHARE_ERROR:.0%}"))
    report("fairness-heavy", rows, values)


def _percentiles(took_s: Mapping[str, Sequence[float]], prefix: str) -> dict[str, float]:
    p50 = {f"{prefix}{name}_p50_s": median(seconds) for name, seconds in took_s.items()}
    return p50 | {f"{prefix}{name}_p95_s": percentile(seconds, 0.95) for name, seconds in took_s.items()}


def _percentile_rows(took_s: Mapping[str, Sequence[float]], prefix: str) -> list[tuple[str, str, str]]:
    return [
        (f"{prefix}{name}: p50, p95", f"{median(seconds):.3f} s, {percentile(seconds, 0.95):.3f} s", "")
        for name, seconds in took_s.items()
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-fairness", description=__doc__)
    parser.add_argument("--requests", type=int, default=40, help="of the first tenant, of each round (default: 40)")
    parser.add_argument("--rounds", type=int, default=3, help="alone and beside the flood (default: 3)")
    parser.add_argument("--pictures", type=int, default=200, help="that are drawn for shares (default: 200)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of shares of seconds (default: 120)")
    parser.add_argument("--only", choices=("equal", "heavy"), default="", help="one part of it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
