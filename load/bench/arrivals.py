"""Two ways for requests to come: from clients that wait for each answer, and at random times that wait for nothing."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from load.bench.report import percentile

# Of which typical_arrivals takes the one in the middle.
_CANDIDATES = 101

Draw = Callable[[int], Awaitable[None]]
"""Draws the request of that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of an open loop: when it is meant to come, after the start, and its denoising steps."""

    at_s: float
    steps: int


async def closed_loop(draw: Draw, *, requests: int, clients: int) -> float:
    """Requests per second of `clients` that each draw the next one as soon as their last one is done."""
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            await draw(number)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return requests / (time.perf_counter() - began)


def poisson(rate_per_s: float, steps: Sequence[int], rng: random.Random) -> list[Arrival]:
    """Arrivals at random, `rate_per_s` on average, one for each of `steps`."""
    at_s = 0.0
    arrivals = []
    for count in steps:
        at_s += rng.expovariate(rate_per_s)
        arrivals.append(Arrival(at_s=at_s, steps=count))
    return arrivals


async def open_loop(draw: Draw, arrivals: Sequence[Arrival]) -> list[float]:
    """Seconds that each request took from the time at which it was meant to come."""
    began = time.perf_counter()
    took_s = [0.0] * len(arrivals)

    async def request(number: int) -> None:
        await draw(number)
        took_s[number] = time.perf_counter() - began - arrivals[number].at_s

    async with asyncio.TaskGroup() as group:
        for number, arrival in enumerate(arrivals):
            await asyncio.sleep(max(began + arrival.at_s - time.perf_counter(), 0.0))
            group.create_task(request(number))
    return took_s


def one_by_one(at_s: Sequence[float], service_s: Iterator[float]) -> list[float]:
    """Seconds from arrival to end where a server takes one at a time, first come first. service_s: what each takes."""
    took_s, free_s = [], 0.0
    for arrived_s in at_s:
        free_s = max(free_s, arrived_s) + next(service_s)
        took_s.append(free_s - arrived_s)
    return took_s


def typical_arrivals(rate_per_s: float, count: int, *, capacity_per_s: float, seed: str = "") -> list[float]:
    """When so many requests come, at random, in a run that is neither a lucky nor an unlucky one.

    What a queue near its capacity does depends on the run more than on the server: at full load the p95 of a hundred
    requests is 3 service times or 15. So this is, of 101 runs of a Poisson process, the one in which the p95 of a
    server that takes one at a time, for equally long, is the median.
    """

    def run(number: int) -> list[float]:
        chance = random.Random(f"{seed} {number}")
        gaps_s = (chance.expovariate(rate_per_s) for _ in range(count))
        return list(itertools.accumulate(gaps_s))

    def p95_s(at_s: Sequence[float]) -> float:
        return percentile(one_by_one(at_s, itertools.repeat(1.0 / capacity_per_s)), 0.95)

    return sorted(map(run, range(_CANDIDATES)), key=p95_s)[_CANDIDATES // 2]
