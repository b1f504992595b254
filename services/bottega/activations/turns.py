"""A queue in which edits take turns; each edit's items keep the order of their requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Turn(Protocol):
    """An item of the queue, with the edit that it belongs to and its place among all items."""

    @property
    def edit(self) -> int: ...

    @property
    def order(self) -> int: ...


TurnT = TypeVar("TurnT", bound=Turn)


class TurnQueue(Generic[TurnT]):
    """A queue in which edits take turns. Not thread-safe."""

    def __init__(self) -> None:
        self._spent_bytes = 0  # Bytes sent in the current turn.
        # By edit, the current one first. Lists are short: an edit requests the sections of a few steps.
        self._edits: OrderedDict[int, list[TurnT]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._edits)

    def __iter__(self) -> Iterator[TurnT]:
        for items in self._edits.values():
            yield from items

    def add(self, item: TurnT) -> None:
        """Add an item in order, possibly before later ones of the same edit."""
        items = self._edits.setdefault(item.edit, [])
        place = len(items)
        while place and items[place - 1].order > item.order:
            place -= 1
        items.insert(place, item)

    def first(self) -> TurnT:
        """Return the first item of the current edit. Raise IndexError if the queue is empty."""
        for items in self._edits.values():
            return items[0]
        raise IndexError("the queue is empty")

    def spend(self, size_bytes: int, *, turn_bytes: int) -> None:
        """Count bytes sent for the first item; after `turn_bytes` the next edit has its turn."""
        self._spent_bytes += size_bytes
        if self._spent_bytes >= turn_bytes:
            self._pass_on()

    def remove(self, item: TurnT) -> None:
        """Remove an item. Raise ValueError if it is not in the queue."""
        items = self._edits.get(item.edit, [])
        items.remove(item)
        if not items:
            is_first = next(iter(self._edits)) == item.edit
            del self._edits[item.edit]
            if is_first:
                self._spent_bytes = 0

    def pop(self) -> TurnT:
        """Remove and return the first item, and pass the turn on. Raise IndexError if the queue is empty."""
        item = self.first()
        self._pass_on()
        self.remove(item)
        return item

    def find(self, wanted: Callable[[TurnT], bool]) -> TurnT | None:
        """Return the first item that satisfies `wanted`, or None."""
        return next((item for item in self if wanted(item)), None)

    def _pass_on(self) -> None:
        self._spent_bytes = 0
        if self._edits:
            self._edits.move_to_end(next(iter(self._edits)))
