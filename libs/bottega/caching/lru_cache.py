"""A cache of entries by key, limited in bytes and number, which evicts the least recently used idle entry first.

The owner calls it under its own lock. It loads nothing, and does not know what an entry is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class LruEntry(Protocol):
    """The interface of a cached entry. Its size may change."""

    @property
    def size_bytes(self) -> int:
        """Bytes that count against the budget."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether the entry may be evicted: it is complete and not in use."""
        ...


EntryT = TypeVar("EntryT", bound=LruEntry)


def _ignore(_key: str, _entry: object) -> None:
    """Do nothing: the default for `on_evict`."""


class LruCache(Generic[EntryT]):
    """A cache that evicts the least recently used idle entry first. Entries with keys in `pinned` are never evicted.

    Args:
        budget_bytes: Maximum bytes of all entries together.
        max_entries: Maximum number of entries.
        on_evict: Called with every evicted entry.
        order: Returns the keys of all entries in eviction order, which replaces the order of last use.
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
        # The least recently used entry comes first.
        self._entries: OrderedDict[str, EntryT] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries. Thread-safe."""
        return sum(entry.size_bytes for entry in list(self._entries.values()))

    def items(self) -> Iterator[tuple[str, EntryT]]:
        """Return all entries, the least recently used first. Thread-safe."""
        return iter(list(self._entries.items()))

    def get(self, key: str) -> EntryT | None:
        """Return the entry without marking it as used; None if there is none."""
        return self._entries.get(key)

    def use(self, key: str) -> EntryT | None:
        """Return the entry, marked as the most recently used; None if there is none."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def add(self, key: str, entry: EntryT) -> None:
        """Add an entry as the most recently used. If its size is known, call `make_room` first."""
        self._entries[key] = entry
        self._entries.move_to_end(key)

    def remove(self, key: str) -> EntryT | None:
        """Remove an entry without calling `on_evict`. Return it, or None if there is none."""
        return self._entries.pop(key, None)

    def make_room(self, size_bytes: int) -> int | None:
        """Evict idle entries until an entry of `size_bytes` fits. Return how many were evicted.

        If evicting all idle entries does not suffice, evict none and return None.
        """
        lack = len(self._entries) + 1 - self._max_entries if self._max_entries is not None else 0
        return self._evict_idle(self.used_bytes + size_bytes - self._budget_bytes, lack)

    def free(self, size_bytes: int) -> int | None:
        """Evict idle entries of at least `size_bytes` in total, even if the budget is not used up. Return how many.

        If all idle entries together have less, evict none and return None.
        """
        return self._evict_idle(size_bytes, 0)

    def trim_idle(self) -> None:
        """Evict idle entries until those that remain fit into the budget. Entries in use do not count."""
        idle = list(self._idle())
        excess_bytes = sum(entry.size_bytes for _, entry in idle) - self._budget_bytes
        for key, entry in idle:
            if excess_bytes <= 0:
                return
            excess_bytes -= entry.size_bytes
            self.evict([key])

    def evict(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._on_evict(key, self._entries.pop(key))

    def clear(self) -> None:
        self.evict(list(self._entries))

    def _evict_idle(self, lack_bytes: int, lack: int) -> int | None:
        """Evict idle entries, at least `lack` of them with `lack_bytes` in all. Return how many.

        Return None, without evicting any, if there are too few.
        """
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
        for key in self._order() if self._order is not None else self._entries:
            entry = self._entries[key]
            if entry.is_idle and key not in self.pinned:
                yield key, entry
