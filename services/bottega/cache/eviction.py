"""Eviction of cached items: one heap, and policies as functions of an item's usage. Plain Python.

Source: Nirvana (NSDI'24), section 5.4: least computationally beneficial and frequently used (LCBFU), against LRU, LFU
and FIFO. This module knows neither files nor indexes: the owner of the items reports their use and deletes what is
evicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

NameT = TypeVar("NameT", bound=Hashable)

# Removed items may hold this share of a heap's places before it is rebuilt.
_MOST_REMOVED = 0.5
_LEAST_PLACES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How an item was used so far."""

    frequency: float = 0.0
    """Number of uses.

    A new item has 0, and so is among the first to be evicted: it has saved nothing yet. Under a policy with a
    half-life, older uses count less, and this is their weighted number at `used_at`."""
    step: int = 1
    """Denoising steps that one use of the item saves (Nirvana's K); 1 if all items save the same."""
    used_at: float = 0.0
    """Last use, on a monotonic clock in any unit (lookups, seconds); not before created_at."""
    created_at: float = 0.0

    def used(self, at: float, half_life: float = math.inf) -> Usage:
        """Return the usage after one more use.

        Args:
            half_life: Time in which the weight of a use halves, in the clock's unit.
        """
        at = max(at, self.used_at)
        worth = self.frequency * 2.0 ** (-(at - self.used_at) / half_life)
        return replace(self, frequency=worth + 1.0, used_at=at)


Score = Callable[[Usage], float]
"""Returns an item's score; the lowest is evicted first. A use must not lower it, and it must not change otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPolicy:
    """A rule for what is evicted first: the item with the lowest score, among equals the least recently used."""

    name: str
    score: Score
    half_life: float = math.inf
    """Half-life of `Usage.frequency`; see Usage.used."""


def decayed_lcbfu(half_life: float) -> EvictionPolicy:
    """Return LCBFU with uses whose weight halves in `half_life`, so that items may lose popularity.

    The score at time t is frequency x step x 2 ** (-(t - used_at) / half_life). All items lose weight at the same rate,
    so the part with t does not affect the order. The rest is kept as a logarithm, so that large clock values do not
    overflow.
    """
    if not half_life > 0.0:
        raise ValueError(f"a half-life must be more than 0; got {half_life}")

    def score(usage: Usage) -> float:
        if not usage.frequency:
            return -math.inf
        return math.log2(usage.frequency * usage.step) + usage.used_at / half_life

    return EvictionPolicy(name="lcbfu-decayed", score=score, half_life=half_life)


LCBFU = EvictionPolicy(name="lcbfu", score=lambda usage: usage.frequency * usage.step)
"""Evicts the item that has saved the fewest steps: frequency x step (Nirvana's LCBFU score)."""

LRU = EvictionPolicy(name="lru", score=lambda usage: usage.used_at)
"""Evicts the least recently used item."""

LFU = EvictionPolicy(name="lfu", score=lambda usage: usage.frequency)
"""Evicts the least frequently used item."""

FIFO = EvictionPolicy(name="fifo", score=lambda usage: usage.created_at)
"""Evicts the oldest item."""


@dataclass(slots=True)
class _Item:
    usage: Usage
    size_bytes: int
    number: int


@dataclass(slots=True)
class EvictionHeap(Generic[NameT]):
    """Items with sizes, in eviction order. Not thread-safe.

    A use costs no search: an item's position follows from the score when it was last examined, and is corrected when
    the item reaches the top. As scores only rise, an item at the top whose score is up to date has the lowest of all.
    """

    policy: EvictionPolicy
    size_bytes: int = field(default=0, init=False)
    _items: dict[NameT, _Item] = field(default_factory=dict, init=False)
    # (score, used_at, number, name). A removed item leaves its place behind.
    _places: list[tuple[float, float, int, NameT]] = field(default_factory=list, init=False)
    _number: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def add(self, name: NameT, usage: Usage, *, size_bytes: int = 1) -> None:
        """Add an item. Raise ValueError if there is one of this name.

        Evict before the call, not after it: a new item was never used, so it might itself be evicted.
        """
        if name in self._items:
            raise ValueError(f"an item {name!r} already exists")
        self._number += 1
        self._items[name] = _Item(usage=usage, size_bytes=size_bytes, number=self._number)
        self.size_bytes += size_bytes
        heappush(self._places, self._place(name))

    def use(self, name: NameT, at: float) -> Usage:
        """Count a use at time `at`, and return the item's new usage. Raise KeyError if there is no such item."""
        item = self._items[name]
        item.usage = item.usage.used(at, self.policy.half_life)
        return item.usage

    def usage(self, name: NameT) -> Usage:
        """Return an item's usage. Raise KeyError if there is no such item."""
        return self._items[name].usage

    def remove(self, name: NameT) -> None:
        """Remove an item. Raise KeyError if there is no such item."""
        self.size_bytes -= self._items.pop(name).size_bytes
        if len(self._places) > max(_LEAST_PLACES, len(self._items) / (1 - _MOST_REMOVED)):
            self._places = [self._place(other) for other in self._items]
            heapify(self._places)

    def evict(self, until_bytes: int) -> list[NameT]:
        """Evict items until the others have at most `until_bytes` bytes; return the names of the evicted items.

        To evict in batches, pass less than the budget: the owner then deletes several items together.
        """
        gone: list[NameT] = []
        while self.size_bytes > until_bytes and self._items:
            name = self._least()
            heappop(self._places)
            self.size_bytes -= self._items.pop(name).size_bytes
            gone.append(name)
        return gone

    def _least(self) -> NameT:
        """Return the item to evict next, after moving it to the top. There must be an item."""
        while True:
            place = self._places[0]
            name = place[3]
            item = self._items.get(name)
            if item is None or item.number != place[2]:
                heappop(self._places)
            elif item.usage.used_at != place[1]:
                heapreplace(self._places, self._place(name))
            else:
                return name

    def _place(self, name: NameT) -> tuple[float, float, int, NameT]:
        item = self._items[name]
        return self.policy.score(item.usage), item.usage.used_at, item.number, name
