"""Where do edits go, live: by the gateway's policy over two workers, against balancing by requests and masked tokens?

The policy is a gateway with two workers. The two others are a client that binds every edit when it comes to one of two
gateways that have one worker each, as a balancer in front of two servers does. Workers have a thread each; the same
edits come at the same times on every side. Few edits of one machine say less than the simulation of bench-scheduling.

A run takes 32 minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bottega.client import AsyncClient
from load.bench.bench_model import write_bench_model
from load.bench.edit_model import EDIT_SHAPE
from load.bench.edit_serving import CLIENTS, TIMEOUT_S, EditSuite
from load.bench.framework import Bench, Option, Sheet, percentile
from load.bench.suites import suite
from load.bench.typical_arrivals import typical_arrivals
from load.replay.driver import replay
from load.replay.results import Result
from load.replay.trace_shape import PUBLIC

LOAD = 0.9
_WORKERS = 2
_ACTIVATIONS_MIB = 2048
BENCH = Bench(
    __file__,
    __doc__,
    Option("--edits", 40, "of each round, on each side", smallest=2),
    Option("--rounds", 2, "of all sides", smallest=1),
    Option("--steps", 6, "of each edit; one less runs", smallest=3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An edit that comes; its seed is its number."""

    number: int
    share: float
    """Share of the tokens that its mask has."""
    at_s: float


class Balancer:
    """Binds each edit, when it comes, to the suite whose unfinished edits weigh least.

    Args:
        weight: Of an edit; 1 counts requests, its tokens count what is to be computed.
    """

    def __init__(self, suites: Sequence[EditSuite], weight: Callable[[Case], float]) -> None:
        self._suites = suites
        self._weight = weight
        self._unfinished = [0.0] * len(suites)

    async def draw(self, case: Case) -> None:
        """Draw an edit, and wait for its picture."""
        place = min(range(len(self._suites)), key=self._unfinished.__getitem__)
        self._unfinished[place] += self._weight(case)
        try:
            await self._suites[place].edit(case.share, case.number)
        finally:
            self._unfinished[place] -= self._weight(case)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Run a suite with both workers and two with one each, and compare."""
    model = folder / "model"
    write_bench_model(model, EDIT_SHAPE.for_run(smallest=options.smallest))
    edits = {"activations_mib": _ACTIVATIONS_MIB}
    engine = {"model": str(model), "model_name": "bench", "threads": 1, "edits": edits}
    with ExitStack() as stack:
        addresses = []
        for place, workers in enumerate((_WORKERS, *[1] * _WORKERS)):
            services: dict[str, Mapping[str, object]] = {"activations": {"min_free_bytes": 0}}
            services |= {f"worker-{number}": {"engine": engine} for number in range(workers)}
            addresses.append(stack.enter_context(suite(folder / f"fleet-{place}", services)).address)
        took_s = asyncio.run(_compare(addresses, options))
    p95_s = {name: percentile(seconds, 0.95) for name, seconds in took_s.items()}
    for name, seconds in took_s.items():
        sheet.row(f"{name}: p50, p95", f"{median(seconds):.2f} s, {p95_s[name]:.2f} s")
        sheet.values |= {f"p95_s_{name}": p95_s[name], f"p50_s_{name}": median(seconds)}
    reduction = 1.0 - p95_s["policy"] / p95_s["requests"]
    sheet.figure("p95 against balancing by requests", reduction, key="p95_reduction")
    sheet.figure("the same against masked tokens", 1.0 - p95_s["policy"] / p95_s["tokens"], key="vs_tokens")


async def _compare(addresses: Sequence[str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds that each edit took, by side.

    Args:
        addresses: Of the gateway with two workers, and of those with one each.
    """
    clients = [AsyncClient(address, timeout_s=TIMEOUT_S) for address in addresses]
    both, *single = [EditSuite(client, options.steps) for client in clients]
    try:
        for each in (both, *single):
            await each.record()
        shares = list(itertools.islice(PUBLIC.draw(random.Random("live")), options.edits))
        for each in (both, *single):
            await each.per_s(shares[:CLIENTS], CLIENTS)  # pays for what is made once
        per_s = await both.per_s(shares[: 2 * CLIENTS], CLIENTS)
        times = typical_arrivals(LOAD * per_s, len(shares), capacity_per_s=per_s)
        cases = [
            Case(number=number, share=share, at_s=at_s)
            for number, (share, at_s) in enumerate(zip(shares, times, strict=True))
        ]
        sides: Mapping[str, Callable[[Case], Awaitable[object]]] = {
            "requests": Balancer(single, lambda case: 1.0).draw,
            "tokens": Balancer(single, lambda case: case.share).draw,
            "policy": lambda case: both.edit(case.share, case.number),
        }
        took_s: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(options.rounds):
            for name in list(sides)[:: -1 if number % 2 else 1]:
                run = await replay(cases, _sender(sides[name]), deadline_s=TIMEOUT_S)
                took_s[name] += run.took_s()
        return took_s
    finally:
        for client in clients:
            await client.close()


def _sender(draw: Callable[[Case], Awaitable[object]]) -> Callable[[Case], Awaitable[Result]]:
    async def send(case: Case) -> Result:
        await draw(case)
        return Result()

    return send


if __name__ == "__main__":
    sys.exit(BENCH.command())
