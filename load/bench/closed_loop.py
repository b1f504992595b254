"""Clients that wait for each answer before they ask again, as benches of throughput want them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

Draw = Callable[[int], Awaitable[None]]
"""Draws the request of that number."""


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
