"""A static server draws together what goes together, in the order of arrival, and tells everybody what became of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from load.bench.static_batches import MAX_BATCH, StaticServer
from tests.support.waiting import eventually

WITHIN_S = 10.0


class Drawn:
    """Batches as they were drawn; the first one waits until it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.goes_on = threading.Event()

    def draw(self, requests: Sequence[str]) -> None:
        self.batches.append(list(requests))
        if "broken" in requests:
            raise ValueError("cannot be drawn")
        assert self.goes_on.wait(WITHIN_S)


def first_letter(request: str) -> str:
    return request[0]


async def behind_a_first_one(
    drawn: Drawn, server: StaticServer[str], requests: Sequence[str]
) -> list[asyncio.Task[None]]:
    """Requests that come while another one is drawn."""
    tasks = [asyncio.create_task(server.draw("a first"))]
    await eventually(lambda: bool(drawn.batches), "the first one to be drawn")
    tasks += [asyncio.create_task(server.draw(request)) for request in requests]
    await asyncio.sleep(0)  # all of them are in the queue
    return tasks


async def test_the_one_that_waits_longest_is_drawn_next_with_all_that_go_with_it() -> None:
    drawn = Drawn()
    server = StaticServer(drawn.draw, together=first_letter)
    tasks = await behind_a_first_one(drawn, server, ["b1", "a1", "b2", "a2"])
    drawn.goes_on.set()
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(*tasks)
    await server.stop()
    assert drawn.batches == [["a first"], ["b1", "b2"], ["a1", "a2"]]


async def test_a_batch_has_eight_at_most() -> None:
    drawn = Drawn()
    server = StaticServer(drawn.draw)
    tasks = await behind_a_first_one(drawn, server, [f"a{number}" for number in range(MAX_BATCH + 1)])
    drawn.goes_on.set()
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(*tasks)
    await server.stop()
    assert list(map(len, drawn.batches)) == [1, MAX_BATCH, 1]


async def test_nobody_draws_what_nobody_waits_for_any_more() -> None:
    drawn = Drawn()
    server = StaticServer(drawn.draw)
    tasks = await behind_a_first_one(drawn, server, ["a gone", "a here"])
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    drawn.goes_on.set()
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(tasks[0], tasks[2])
    await server.stop()
    assert drawn.batches == [["a first"], ["a here"]]


async def test_who_waits_for_a_batch_that_fails_is_told_and_the_next_one_is_drawn() -> None:
    drawn = Drawn()
    server = StaticServer(drawn.draw, together=first_letter)
    tasks = await behind_a_first_one(drawn, server, ["broken", "b1", "c"])
    drawn.goes_on.set()
    async with asyncio.timeout(WITHIN_S):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    await server.stop()
    assert [type(each) for each in ended] == [type(None), ValueError, ValueError, type(None)]
    with pytest.raises(ValueError, match="cannot be drawn"):
        await tasks[1]
