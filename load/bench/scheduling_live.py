"""Where edits go, live: the gateway's policy over two workers, against balancing by requests and by masked tokens.

The policy is a gateway with two workers. The two others are a client that binds every edit when it comes to one of two
gateways that have one worker each, as a balancer in front of two servers does. Workers have a thread each; the same
edits come at the same times on every side. Few edits of one machine say less than the simulation of bench-scheduling.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bottega import kinds
from bottega.client import AsyncClient, Client
from load.bench.bench_model import write_bench_model
from load.bench.edit_model import EDIT_SHAPE
from load.bench.edit_suite import TIMEOUT_S, EditSuite
from load.bench.report import percentile, report
from load.bench.scratch import scratch
from load.bench.typical_arrivals import typical_arrivals
from load.replay.driver import replay
from load.replay.mask_ratios import PUBLIC
from load.replay.results import Result
from tests.support.services import FREE_PORTS, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

LOAD = 0.9
CLIENTS = 8
_WORKERS = 2
_ACTIVATIONS_MIB = 2048
_JOIN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An edit that comes. share: of the tokens that its mask has. Its seed is its number. at_s: when it comes."""

    number: int
    share: float
    at_s: float


class Balancer:
    """Binds each edit, when it comes, to the suite whose unfinished edits weigh least.

    weight: of an edit; 1 counts requests, its tokens count what is to be computed.
    """

    def __init__(self, suites: Sequence[EditSuite], weight: Callable[[Case], float]) -> None:
        self._suites = suites
        self._weight = weight
        self._unfinished = [0.0] * len(suites)

    async def draw(self, case: Case) -> None:
        """Waits for its picture."""
        place = min(range(len(self._suites)), key=self._unfinished.__getitem__)
        self._unfinished[place] += self._weight(case)
        try:
            await self._suites[place].edit(case.share, case.number)
        finally:
            self._unfinished[place] -= self._weight(case)


@contextmanager
def fleet(model: Path, folder: Path, workers: int) -> Iterator[str]:
    """The address of a gateway that so many workers have joined, of one thread each, and an activation store."""
    folder.mkdir(parents=True)
    engine = {"model": str(model), "model_name": "bench", "threads": 1, "edits": {"activations_mib": _ACTIVATIONS_MIB}}
    with Services(folder) as services:
        gateway = services.start("gateway", gateway_config())
        store = {"name": "activations", "gateway": gateway.fleet, "server": FREE_PORTS, "min_free_bytes": 0}
        services.start(kinds.ACTIVATIONS, store)
        for number in range(workers):
            services.start("worker", worker_config(gateway.fleet, name=f"worker-{number}", engine=engine))
        with Client(gateway.address, fleet_address=gateway.fleet) as client:
            wait_until(
                lambda: len(client.fleet().members) == workers + 2,  # the gateway is one of them
                "the workers and the store to join",
                within_s=_JOIN_S,
            )
        yield gateway.address


async def compare(addresses: Sequence[str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds that each edit took, by side. addresses: of the gateway with two workers, and of those with one each."""
    clients = [AsyncClient(address, timeout_s=TIMEOUT_S) for address in addresses]
    both, *single = [EditSuite(client, options.steps) for client in clients]
    try:
        for suite in (both, *single):
            await suite.record()
        shares = _shares(options.edits)
        for suite in (both, *single):
            await suite.per_s(shares[:CLIENTS], CLIENTS)  # pays for what is made once
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


def _shares(count: int) -> list[float]:
    """Of masks, the same ones every time."""
    return list(itertools.islice(PUBLIC.draw(random.Random("live")), count))


def main() -> None:
    """Prints the table and the line of JSON."""
    options = _options()
    with scratch() as folder, ExitStack() as stack:
        model = folder / "model"
        write_bench_model(model, EDIT_SHAPE)
        addresses = [
            stack.enter_context(fleet(model, folder / f"fleet-{place}", workers))
            for place, workers in enumerate((_WORKERS, *[1] * _WORKERS))
        ]
        took_s = asyncio.run(compare(addresses, options))
    p95_s = {name: percentile(seconds, 0.95) for name, seconds in took_s.items()}
    p50_s = {name: median(seconds) for name, seconds in took_s.items()}
    values = {
        "p95_reduction": 1.0 - p95_s["policy"] / p95_s["requests"],
        "vs_tokens": 1.0 - p95_s["policy"] / p95_s["tokens"],
        **{f"p95_s_{name}": seconds for name, seconds in p95_s.items()},
        **{f"p50_s_{name}": seconds for name, seconds in p50_s.items()},
    }
    rows = [(f"{name}: p50, p95", f"{p50_s[name]:.2f} s, {p95_s[name]:.2f} s", "") for name in p95_s]
    rows.append(("p95 against balancing by requests (p95_reduction)", f"{values['p95_reduction']:.2f}", ""))
    rows.append(("the same against masked tokens (vs_tokens)", f"{values['vs_tokens']:.2f}", ""))
    report("scheduling_live", rows, values)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-scheduling-live", description=__doc__)
    parser.add_argument("--edits", type=int, default=40, help="of each round, on each side (default: 40)")
    parser.add_argument("--rounds", type=int, default=2, help="of all sides (default: 2)")
    parser.add_argument("--steps", type=int, default=6, help="of each edit; one less runs (default: 6)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
