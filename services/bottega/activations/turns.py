"""What several edits wait for: each edit's in the order in which it asked, and the edits in turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Turn(Protocol):
    """edit: whose it is. order: its place among all, the first one the lowest."""

    @property
    def edit(self) -> int: ...

    @property
    def order(self) -> int: ...


TurnT = TypeVar("TurnT", bound=Turn)


class TurnQueue(Generic[TurnT]):
    """One thread at a time."""

    def __init__(self) -> None:
        self._spent_bytes = 0  # of the turn
        # By edit, the one whose turn it is first. Lists are short: an edit asks for some steps ahead.
        self._edits: OrderedDict[int, list[TurnT]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._edits)

    def __iter__(self) -> Iterator[TurnT]:
        for items in self._edits.values():
            yield from items

    def add(self, item: TurnT) -> None:
        """It may come later than those behind it of the same edit."""
        items = self._edits.setdefault(item.edit, [])
        place = len(items)
        while place and items[place - 1].order > item.order:
            place -= 1
        items.insert(place, item)

    def first(self) -> TurnT:
        """Of the edit whose turn it is. Raises IndexError where there is none."""
        for items in self._edits.values():
            return items[0]
        raise IndexError("nobody waits for anything")

    def spend(self, size_bytes: int, *, turn_bytes: int) -> None:
        """So much was done for the first one. turn_bytes: after which it is the next edit's turn."""
        self._spent_bytes += size_bytes
        if self._spent_bytes >= turn_bytes:
            self._pass_on()

    def remove(self, item: TurnT) -> None:
        """Raises ValueError where it is not there."""
        items = self._edits.get(item.edit, [])
        items.remove(item)
        if not items:
            is_first = next(iter(self._edits)) == item.edit
            del self._edits[item.edit]
            if is_first:
                self._spent_bytes = 0

    def pop(self) -> TurnT:
        """Takes the first one, and passes the turn on. Raises IndexError where there is none."""
        item = self.first()
        self._pass_on()
        self.remove(item)
        return item

    def find(self, wanted: Callable[[TurnT], bool]) -> TurnT | None:
        """The first one of which that holds."""
        return next((item for item in self if wanted(item)), None)

    def _pass_on(self) -> None:
        self._spent_bytes = 0
        if self._edits:
            self._edits.move_to_end(next(iter(self._edits)))
