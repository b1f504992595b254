"""Edits take turns, and each has what it asked for in its order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bottega.rpc.file_links import TurnQueue


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Item:
    """As a section that was asked for."""

    owner: int
    order: int


def filled(*edits: int) -> TurnQueue[Item]:
    queue = TurnQueue[Item]()
    for order, edit in enumerate(edits):
        queue.add(Item(owner=edit, order=order))
    return queue


def emptied(queue: TurnQueue[Item]) -> list[tuple[int, int]]:
    found = []
    while queue:
        item = queue.pop()
        found.append((item.owner, item.order))
    return found


def test_an_edit_that_asks_for_much_keeps_none_that_asks_later_waiting() -> None:
    assert emptied(filled(1, 1, 1, 1, 2)) == [(1, 0), (2, 4), (1, 1), (1, 2), (1, 3)]


def test_the_sections_of_an_edit_come_in_its_order_whenever_they_are_there() -> None:
    queue = TurnQueue[Item]()
    for order in (3, 1, 2, 0):
        queue.add(Item(owner=1, order=order))
    assert emptied(queue) == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_a_turn_is_so_many_bytes_and_no_more() -> None:
    queue = filled(1, 2)
    turns = []
    for size_bytes in (60, 60, 100, 10, 90, 5):
        turns.append(queue.first().owner)
        queue.spend(size_bytes, turn_bytes=100)
    assert turns == [1, 1, 2, 1, 1, 2]


def test_what_is_taken_out_leaves_the_others_their_turns() -> None:
    queue = filled(1, 2, 1, 3)
    queue.spend(60, turn_bytes=100)
    first = queue.first()
    queue.remove(first)
    assert (queue.first().owner, queue.first().order) == (1, 2)
    queue.remove(queue.first())
    queue.spend(60, turn_bytes=100)
    assert queue.first().owner == 2, "the next one has a whole turn"
    found = queue.find(lambda item: item.owner == 3)
    assert found is not None
    queue.remove(found)
    with pytest.raises(ValueError, match="not in list"):
        queue.remove(found)
    assert emptied(queue) == [(2, 1)]
    with pytest.raises(IndexError):
        queue.first()
