"""Lanes are shared by tenants and by the seconds that calls take, and one tenant's calls refuse none of another's."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping

import pytest

from bottega.fair_order import Share
from bottega.process.process_pool import CallNeed, FairLanes


class Server:
    """Lanes whose calls end when the test says so.

    Args:
        took_s: Seconds that calls of a tenant take, by its name.
    """

    def __init__(self, *, lanes: int = 1, max_waiting: int = 64, took_s: Mapping[str, float] | None = None) -> None:
        self.lanes = FairLanes(list(range(lanes)), max_waiting)
        self.took_s: defaultdict[str, float] = defaultdict(float)
        self._takes_s = took_s or {}
        self._running: dict[int, CallNeed] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def ask(self, tenant: str = "", *, expected_s: float = 1.0, weight: float = 1.0, large: bool = False) -> None:
        """A call that waits, or begins."""
        need = CallNeed(share=Share(tenant=tenant, weight=weight), expected_s=expected_s, large=large)
        self._tasks.append(task := asyncio.create_task(self._run(need)))
        await asyncio.sleep(0)
        if task.done():
            task.result()

    async def is_taken(self, tenant: str, *, large: bool) -> bool:
        """Whether a call begins or may wait."""
        try:
            await self.ask(tenant, large=large)
        except asyncio.QueueFull:
            return False
        return True

    async def end_one(self, tenant: str | None = None) -> str:
        """A call that runs, the first or that of a tenant, ends; returns whose it was."""
        lane, need = next((lane, need) for lane, need in self._running.items() if tenant in (None, need.share.tenant))
        del self._running[lane]
        tenant = need.share.tenant
        took_s = self._takes_s.get(tenant, need.expected_s)
        self.took_s[tenant] += took_s
        self.lanes.settle(need, took_s)
        self.lanes.release(lane)
        await asyncio.sleep(0)
        return tenant

    @property
    def running(self) -> list[str]:
        return [need.share.tenant for need in self._running.values()]

    async def _run(self, need: CallNeed) -> None:
        lane = await self.lanes.acquire(need)
        self._running[lane] = need


async def test_who_comes_to_a_long_line_of_another_is_next() -> None:
    server = Server()
    for _ in range(20):
        await server.ask("flood", large=True)
    await server.ask("one", large=True)
    assert [await server.end_one() for _ in range(3)] == ["flood", "one", "flood"]


async def test_calls_that_take_longer_than_their_headers_say_gain_nothing() -> None:
    server = Server(max_waiting=2000, took_s={"liar": 1.0, "honest": 0.1})
    for _ in range(400):
        await server.ask("liar", expected_s=0.01)
        await server.ask("honest", expected_s=0.1)
    while sum(server.took_s.values()) < 30.0:
        await server.end_one()
    assert server.took_s["liar"] / sum(server.took_s.values()) == pytest.approx(0.5, abs=0.05)


async def test_lanes_are_shared_by_weight() -> None:
    server = Server(max_waiting=2000)
    for _ in range(300):
        await server.ask("three", weight=3.0)
        await server.ask("one")
    served = [await server.end_one() for _ in range(200)]
    assert served.count("three") == pytest.approx(150, abs=3)


async def test_calls_of_one_tenant_are_served_in_the_order_in_which_they_came() -> None:
    lanes = FairLanes([0], 8)
    first = await lanes.acquire(CallNeed())
    order: list[int] = []

    async def ask(number: int) -> None:
        lane = await lanes.acquire(CallNeed(expected_s=9.0 - number))
        order.append(number)
        lanes.settle(CallNeed(), 1.0)
        lanes.release(lane)

    tasks = [asyncio.create_task(ask(number)) for number in range(5)]
    await asyncio.sleep(0)
    lanes.release(first)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("large", [False, True])
async def test_a_tenant_whose_line_is_full_leaves_room_for_others(large: bool) -> None:
    server = Server(max_waiting=16)
    taken = [await server.is_taken("flood", large=large) for _ in range(17)]
    assert not taken[-1]
    await server.ask("one", large=large)
    await server.ask("other", large=large)


async def test_a_caller_that_leaves_when_its_turn_comes_gives_the_lane_back() -> None:
    lanes = FairLanes([0], 8)
    lane = await lanes.acquire(CallNeed())
    gone = asyncio.create_task(lanes.acquire(CallNeed()))
    await asyncio.sleep(0)
    lanes.release(lane)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert await asyncio.wait_for(lanes.acquire(CallNeed()), 5) == lane
    assert len(lanes) == 0


async def test_small_calls_that_pass_a_large_one_by_do_not_make_it_wait_longer() -> None:
    server = Server(lanes=2)
    for _ in range(5):
        await server.ask("flood", large=True)
    await server.ask("one", large=True)
    for _ in range(20):
        await server.ask("small")
    while "small" in server.running:
        await server.end_one("small")
    assert await server.end_one("flood") == "flood"
    assert server.running == ["one"]


async def test_large_calls_leave_a_lane_to_small_ones_whoever_sends_them() -> None:
    server = Server(lanes=2)
    for tenant in ("flood", "other"):
        await server.ask(tenant, large=True)
    await server.ask("one")
    assert sorted(server.running) == ["flood", "one"]
