"""Who may join, how often and how many, on a clock that the test turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bottega.addons.interface.views import Member
from bottega.errors import BottegaError, FleetFull, InvalidRequest, QueueFull
from bottega.gateway.fleet.join_limits import MAX_NAMELESS, JoinBounds, PendingJoins
from bottega.gateway.fleet.registry import Fleet
from bottega.v1 import fleet_pb2
from tests.fakes.fake_time import FakeTime
from tests.samples.controlnet_hosts import again, server

BOUNDS = JoinBounds(max_members=8, max_members_per_peer=4, joins_per_s=2.0, joins_per_s_by_name=1.0)


class Gate:
    """A fleet with small bounds, and its clock."""

    def __init__(self, bounds: JoinBounds = BOUNDS) -> None:
        self.time = FakeTime()
        self.fleet = Fleet(lease_s=1.5, model_grace_s=30, bounds=bounds, clock=self.time.clock())

    def join(self, name: str, *, port: int = 1, host: str = "10.0.0.1", connection: int = 0) -> Member:
        """One join, over a connection of its own unless it is said."""
        return self.fleet.join(server(name, port=port), peer=f"ipv4:{host}:{connection or port}")

    def flood(self, count: int, join: Callable[[int], Member]) -> list[BottegaError]:
        """Those of so many joins at once that were refused."""
        refused: list[BottegaError] = []
        for number in range(count):
            try:
                join(number)
            except BottegaError as error:
                refused.append(error)
        return refused


def test_members_of_one_host_leave_room_for_those_of_others() -> None:
    gate = Gate()
    refused = gate.flood(20, lambda n: gate.join(f"s{n}", port=100 + n))
    assert len(gate.fleet.members()) == BOUNDS.max_members_per_peer
    full = [error for error in refused if isinstance(error, FleetFull)]
    assert not full, "they came too often before they were too many"
    gate.time.now += 60
    for member in gate.fleet.members():
        gate.fleet.report(member, fleet_pb2.Load())
    with pytest.raises(FleetFull) as caught:
        gate.join("late", port=999)
    assert caught.value.metadata == {"fleet.max_members_per_peer": "4"}
    assert caught.value.retry_after_s
    assert gate.join("other", host="10.0.0.2").connected


def test_who_joins_too_often_is_told_when_to_come_again() -> None:
    gate = Gate()
    (*_, last) = gate.flood(40, lambda n: gate.join(f"s{n}", port=100 + n))
    assert isinstance(last, QueueFull)
    assert last.metadata == {"limit": "fleet.joins_per_s"}
    assert last.retry_after_s
    assert 0 < last.retry_after_s <= 1 / BOUNDS.joins_per_s
    assert gate.join("other", host="10.0.0.2").connected


def test_a_flood_over_one_connection_takes_nothing_from_others_of_its_host() -> None:
    gate = Gate(JoinBounds(max_members=8, max_members_per_peer=10, joins_per_s=1.0, joins_per_s_by_name=1.0))
    worker = gate.join("w1", port=7)
    refused = gate.flood(500, lambda n: gate.join("w1", port=8, connection=9))
    assert len(refused) == 500
    assert {type(error) for error in refused} == {InvalidRequest, QueueFull}
    assert worker.connected
    assert gate.join("w2", port=10).connected


def test_a_flood_of_names_keeps_no_known_instance_from_coming_back() -> None:
    gate = Gate()
    worker = gate.join("w1", port=7)
    gate.time.now += 600
    gate.fleet.report(worker, fleet_pb2.Load())
    # Within its lease.
    gate.fleet.leave(worker, worker.stream)
    gate.flood(300, lambda n: gate.join(f"s{n}", port=100 + n, host=f"10.0.1.{n % 200}"))
    assert gate.join("w1", port=7) is worker
    # And long after it, when the fleet has been full of others again and again.
    gate.fleet.leave(worker, worker.stream)
    for _ in range(5):
        gate.time.now += 2
        gate.fleet.expire()
        gate.flood(300, lambda n: gate.join(f"s{n}", port=100 + n, host=f"10.0.1.{n % 200}"))
    assert len(gate.fleet.members()) == BOUNDS.max_members
    back = gate.join("w1", port=7)
    assert back.connected
    assert back is not worker
    with pytest.raises((FleetFull, QueueFull)):
        gate.join("w2", port=8)


def test_a_host_that_joins_and_leaves_again_and_again_never_has_more_than_its_share() -> None:
    gate = Gate()
    share = BOUNDS.max_members_per_peer
    for first in (0, share):
        for number in range(first, first + share):
            gate.time.now += 10 / BOUNDS.joins_per_s
            gate.fleet.expire()
            gate.join(f"s{number}", port=100 + number)
    gate.fleet.renew_leases()
    gate.flood(2 * share, lambda n: gate.join(f"s{n}", port=100 + n))  # all of them were members
    assert len(gate.fleet.members()) <= 0.75 * BOUNDS.max_members
    assert gate.join("other", host="10.0.0.2").connected


def test_a_host_that_floods_a_name_takes_nothing_from_that_name_at_another_host() -> None:
    gate = Gate()
    gate.flood(300, lambda n: gate.join("gpu-1", port=100 + n, host="10.0.9.9"))
    gate.time.now += 2
    gate.fleet.expire()
    gate.flood(300, lambda n: gate.join("other", port=100 + n, host="10.0.9.9"))
    gate.flood(300, lambda n: gate.join("gpu-1", port=500 + n, host="10.0.9.9"))
    gate.time.now += 2
    gate.fleet.expire()
    assert gate.join("gpu-1", port=7).connected


def test_a_known_name_is_no_known_instance() -> None:
    gate = Gate()
    worker = gate.join("w1", port=7)
    gate.time.now += 600
    gate.fleet.expire()
    gate.flood(300, lambda n: gate.join(f"s{n}", port=100 + n, host=f"10.0.1.{n % 200}"))
    rogue = again(worker.registration)
    rogue.instance = "f" * 32
    with pytest.raises((FleetFull, QueueFull)):
        gate.fleet.join(rogue, peer="ipv4:10.0.0.1:5")


def test_what_is_counted_of_joins_is_bounded() -> None:
    gate = Gate()
    gate.flood(6_000, lambda n: gate.join(f"s{n}", port=1 + n % 60_000, host=f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}"))
    limits = gate.fleet._limits
    for rates in (limits._hosts, limits._names, limits._connections):
        assert len(rates._left) <= 4096
    assert len(limits._known._past) <= BOUNDS.max_members


async def test_joins_that_do_not_say_who_joins_make_room_for_those_that_do() -> None:
    pending = PendingJoins()
    entered: list[asyncio.Future[None]] = []

    async def wait(host: str) -> None:
        with pending.slot(host) as crowded_out:
            entered.append(crowded_out)
            await crowded_out

    waiting = [asyncio.create_task(wait("new")) for _ in range(MAX_NAMELESS)]
    await asyncio.sleep(0)
    with pending.slot("w1") as place:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting[0].done(), "the oldest of those of whom there are most"
        assert not any(task.done() for task in waiting[1:])
        more = [asyncio.create_task(wait("new")) for _ in range(10 * MAX_NAMELESS)]
        await asyncio.sleep(0.05)
        assert not place.done()
        assert len(pending._waiting) <= MAX_NAMELESS
    for task in (*waiting, *more):
        task.cancel()
    await asyncio.gather(*waiting, *more, return_exceptions=True)
    assert not pending._waiting
