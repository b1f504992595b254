"""Entries by key within a budget of bytes and a number: when room is needed, the idle one used longest ago goes first.

Its calls are made under the lock of its owner. It loads nothing, and does not know what an entry is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class LruEntry(Protocol):
    """What may be kept. Its size may change while it is kept."""

    @property
    def size_bytes(self) -> int:
        """That it takes of the budget."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether it may be evicted: it is complete, and nobody uses it."""
        ...


EntryT = TypeVar("EntryT", bound=LruEntry)


def _ignore(_key: str, _entry: object) -> None:
    """For entries that hold nothing but memory."""


class LruCache(Generic[EntryT]):
    """budget_bytes, max_entries: of all together. pinned: keys of entries that are never evicted.

    on_evict: called with every entry that is evicted. order: the keys of all entries, in the order in which they go,
    where that is not by last use.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        max_entries: int | None = None,
        on_evict: Callable[[str, EntryT], object] = _ignore,
        order: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        self.pinned: frozenset[str] = frozenset()
        self._budget_bytes = budget_bytes
        self._max_entries = max_entries
        self._on_evict = on_evict
        self._order = order
        # The one used longest ago first.
        self._entries: OrderedDict[str, EntryT] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """Of all. Any thread may ask."""
        return sum(entry.size_bytes for entry in list(self._entries.values()))

    def items(self) -> Iterator[tuple[str, EntryT]]:
        """All, the one used longest ago first. Any thread may ask."""
        return iter(list(self._entries.items()))

    def get(self, key: str) -> EntryT | None:
        """Returns the entry without marking it as used."""
        return self._entries.get(key)

    def use(self, key: str) -> EntryT | None:
        """The same, and now it is the one used last."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def add(self, key: str, entry: EntryT) -> None:
        """It is the one used last. Call `make_room` before, where its size is known."""
        self._entries[key] = entry
        self._entries.move_to_end(key)

    def remove(self, key: str) -> EntryT | None:
        """Takes it out, without a call of on_evict."""
        return self._entries.pop(key, None)

    def make_room(self, size_bytes: int) -> int | None:
        """Evicts idle entries until one of that size fits. Returns how many.

        Evicts none and returns None where it cannot fit.
        """
        lack = len(self._entries) + 1 - self._max_entries if self._max_entries is not None else 0
        return self._evict_idle(self.used_bytes + size_bytes - self._budget_bytes, lack)

    def free(self, size_bytes: int) -> int | None:
        """Evicts idle entries that have so many bytes together, however much of the budget is left. Returns how many.

        Evicts none and returns None where all of them have less.
        """
        return self._evict_idle(size_bytes, 0)

    def trim_idle(self) -> None:
        """Evicts what is idle beyond the budget: what is in use does not count against it."""
        idle = list(self._idle())
        excess_bytes = sum(entry.size_bytes for _, entry in idle) - self._budget_bytes
        for key, entry in idle:
            if excess_bytes <= 0:
                return
            excess_bytes -= entry.size_bytes
            self.evict([key])

    def evict(self, keys: Iterable[str]) -> None:
        """Takes these out."""
        for key in keys:
            self._on_evict(key, self._entries.pop(key))

    def clear(self) -> None:
        """Takes all out."""
        self.evict(list(self._entries))

    def _evict_idle(self, lack_bytes: int, lack: int) -> int | None:
        """Until neither bytes nor entries are lacking; none where they would be all the same."""
        victims = []
        for key, entry in self._idle():
            if lack_bytes <= 0 and lack <= 0:
                break
            victims.append(key)
            lack_bytes -= entry.size_bytes
            lack -= 1
        if lack_bytes > 0 or lack > 0:
            return None
        self.evict(victims)
        return len(victims)

    def _idle(self) -> Iterator[tuple[str, EntryT]]:
        """Those that may be evicted, in the order in which they go."""
        for key in self._order() if self._order is not None else self._entries:
            entry = self._entries[key]
            if entry.is_idle and key not in self.pinned:
                yield key, entry
