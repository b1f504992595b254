"""Two ways for requests to come: from clients that wait for each answer, and at random times that wait for nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

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
