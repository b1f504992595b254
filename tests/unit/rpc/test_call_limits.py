"""Limits of calls: nobody who asks for many takes the room of those who ask for few."""

from __future__ import annotations

import asyncio

import pytest

from bottega.errors import QueueFull
from bottega.rpc.address import Peer
from bottega.rpc.interceptor.call_limits import CallLimit, CallSlot
from bottega.rpc.interceptor.memory_quota import CallTurn, FairQueue, MemoryQuota


def peer(host: str, port: int = 1) -> Peer:
    return Peer(connection=f"{host} {port}", host=host)


def taken(places: CallLimit, who: Peer) -> list[CallSlot]:
    got: list[CallSlot] = []
    while True:
        try:
            got.append(places.acquire(who))
        except QueueFull:
            return got


def streams(most: int, share: float = 0.5) -> CallLimit:
    return CallLimit(max_calls=most, share=share, limit="max_streams")


def test_a_host_alone_has_its_share_and_each_of_its_connections_a_part_of_that() -> None:
    places = streams(2048)
    assert len(taken(places, peer("a"))) == 512
    rest = [len(taken(places, peer("a", port))) for port in range(2, 20)]
    assert rest[0] >= 128, "another program of the same host still has room"
    assert 512 + sum(rest) == 1024


def test_hosts_that_come_later_find_room_however_much_others_hold() -> None:
    places = streams(2048)
    held = [sum(len(taken(places, peer(host, port))) for port in range(40)) for host in "abcde"]
    assert held[0] == 1024
    assert all(later >= 32 for later in held)
    assert sum(held) < 2048


def test_a_host_has_more_again_when_others_have_gone() -> None:
    places = streams(64)
    first = taken(places, peer("a"))
    alone = len(first)
    others = taken(places, peer("b"))
    for place in (*first, *others):
        place.end_serving()
        place.release()
    assert len(taken(places, peer("a"))) == alone
    assert set(places.connections()) == {"a 1"}, "who has gone is forgotten"


@pytest.mark.parametrize("most", [1, 2, 3])
def test_even_of_few_places_there_is_one(most: int) -> None:
    assert taken(streams(most), peer("a"))


def test_who_finds_no_place_hears_which_limit_it_is_and_when_to_ask_again() -> None:
    places = streams(4)
    taken(places, peer("a"))
    with pytest.raises(QueueFull) as caught:
        places.acquire(peer("a"))
    assert caught.value.metadata == {"limit": "max_streams"}
    assert caught.value.retry_after_s


def test_as_many_as_are_served_may_have_ended_and_be_unread() -> None:
    places = streams(8, share=1.0)
    for _ in range(2):
        unread = taken(places, peer("a"))
        assert len(unread) == 8
        for place in unread:
            place.end_serving()
    assert not taken(places, peer("a"))
    for place in unread:
        place.release()
    assert len(taken(places, peer("a"))) == 8


def popped(turns: FairQueue, *, without: str = "") -> CallTurn | None:
    """The next in turn. without: a host that may not go on."""
    return turns.pop(host=lambda host: host != without, connection=lambda _: True)


async def test_those_who_wait_have_their_turns_one_host_after_the_other() -> None:
    turns = FairQueue()
    crowd = [turns.add(peer("a")) for _ in range(5)]
    beside = turns.add(peer("a", 2))
    late, gone = turns.add(peer("b")), turns.add(peer("b"))
    turns.remove(gone)
    assert [popped(turns) for _ in range(4)] == [crowd[0], late, beside, crowd[1]]
    assert [popped(turns) for _ in range(3)] == crowd[2:]
    assert not turns


async def test_who_may_not_go_on_is_passed_over_and_keeps_its_place() -> None:
    turns = FairQueue()
    first, second = turns.add(peer("a")), turns.add(peer("b"))
    assert popped(turns, without="a") is second
    assert popped(turns, without="a") is None
    assert popped(turns) is first


async def test_no_host_has_all_the_room_for_requests_that_are_coming() -> None:
    quota = MemoryQuota(max_bytes=128, message_bytes=24, share=0.5)
    silent = [asyncio.create_task(quota.reserve(peer("a", number))) for number in range(8)]
    await asyncio.sleep(0)
    coming = [call.result() for call in silent if call.done()]
    assert len(coming) == 2
    others = [await asyncio.wait_for(quota.reserve(peer(host)), 20) for host in ("b", "c", "d")]
    others[0].release()
    others[1].release()
    await asyncio.sleep(0.01)
    assert sum(call.done() for call in silent) == 2
    coming[0].shrink(1)  # it is here, and small: another one of the same host may come
    await asyncio.sleep(0.01)
    assert sum(call.done() for call in silent) == 2 + 1
    for call in silent:
        call.cancel()


async def test_one_caller_has_all_the_room_where_it_may() -> None:
    quota = MemoryQuota(max_bytes=48, message_bytes=24, share=1.0)
    shares = [await asyncio.wait_for(quota.reserve(peer("a")), 20) for _ in range(2)]
    waiting = asyncio.create_task(quota.reserve(peer("a")))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    shares[0].release()
    await asyncio.wait_for(waiting, 20)
