"""Which cached items go first: one heap, and the policies as functions of how an item was used. Plain Python.

Source: Nirvana (NSDI'24), section 5.4: least computationally beneficial and frequently used (LCBFU), against LRU, LFU
and FIFO. Knows neither files nor indexes: whoever keeps the items says what was used, and is told what goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

NameT = TypeVar("NameT", bound=Hashable)

# Of the places of a heap, removed items may hold this share before it is built again.
_MOST_REMOVED = 0.5
_LEAST_PLACES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How an item was used.

    frequency: uses so far, none of a new item: what was never used has saved nothing, and of such items the oldest goes
    first. Under a policy with a half-life, uses of long ago count less; it is then their worth at `used_at`.
    step: denoising steps that one use of the item saves (Nirvana's K); 1 where items are equal.
    used_at, created_at: on a clock that never goes back, in any unit (lookups, seconds); used_at is not before
    created_at.
    """

    frequency: float = 0.0
    step: int = 1
    used_at: float = 0.0
    created_at: float = 0.0

    def used(self, at: float, half_life: float = math.inf) -> Usage:
        """Itself after one more use. half_life: the time in which a use's worth halves, in the clock's unit."""
        at = max(at, self.used_at)
        worth = self.frequency * 2.0 ** (-(at - self.used_at) / half_life)
        return replace(self, frequency=worth + 1.0, used_at=at)


Score = Callable[[Usage], float]
"""The least goes first. It must not fall when an item is used, nor change while it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPolicy:
    """Which item goes first: that of the least score, and of equal ones that which was not used for longest.

    half_life: how the frequencies that it sees are counted; see Usage.
    """

    name: str
    score: Score
    half_life: float = math.inf


def decayed_lcbfu(half_life: float) -> EvictionPolicy:
    """LCBFU whose uses lose half of their worth in `half_life`, so that popularity may move on.

    The score at any time t is frequency x step x 2 ** (-(t - used_at) / half_life). All items lose worth at one pace,
    so its order is that of the part without t, which is kept as a logarithm for the sake of large clocks.
    """
    if not half_life > 0.0:
        raise ValueError(f"a half-life is more than 0; got {half_life}")

    def score(usage: Usage) -> float:
        if not usage.frequency:
            return -math.inf
        return math.log2(usage.frequency * usage.step) + usage.used_at / half_life

    return EvictionPolicy(name="lcbfu-decayed", score=score, half_life=half_life)


LCBFU = EvictionPolicy(name="lcbfu", score=lambda usage: usage.frequency * usage.step)
"""What has saved least: frequency x step (Nirvana's LCBFU score)."""

LRU = EvictionPolicy(name="lru", score=lambda usage: usage.used_at)
"""What was not used for longest."""

LFU = EvictionPolicy(name="lfu", score=lambda usage: usage.frequency)
"""What was used least."""

FIFO = EvictionPolicy(name="fifo", score=lambda usage: usage.created_at)
"""What is oldest."""


@dataclass(slots=True)
class _Item:
    usage: Usage
    size_bytes: int
    number: int


@dataclass(slots=True)
class EvictionHeap(Generic[NameT]):
    """Items with a size, in the order in which they go. Not thread-safe.

    A use costs no search: an item's place is as its score was when it was last looked at, and is mended when it comes
    to the top. As scores only rise, what then is at the top with its true score is the least of all.
    """

    policy: EvictionPolicy
    size_bytes: int = field(default=0, init=False)
    _items: dict[NameT, _Item] = field(default_factory=dict, init=False)
    # (score, used_at, number, name); an item that was removed leaves its place behind.
    _places: list[tuple[float, float, int, NameT]] = field(default_factory=list, init=False)
    _number: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def add(self, name: NameT, usage: Usage, *, size_bytes: int = 1) -> None:
        """Takes an item in. Raises ValueError where there is one of this name.

        Make room before, not after: what is new was never used, and would be among the first to go.
        """
        if name in self._items:
            raise ValueError(f"there is an item {name!r}")
        self._number += 1
        self._items[name] = _Item(usage=usage, size_bytes=size_bytes, number=self._number)
        self.size_bytes += size_bytes
        heappush(self._places, self._place(name))

    def use(self, name: NameT, at: float) -> Usage:
        """Counts a use at a time; returns what the item's usage is now. Raises KeyError."""
        item = self._items[name]
        item.usage = item.usage.used(at, self.policy.half_life)
        return item.usage

    def usage(self, name: NameT) -> Usage:
        """How an item was used. Raises KeyError."""
        return self._items[name].usage

    def remove(self, name: NameT) -> None:
        """Forgets an item. Raises KeyError."""
        self.size_bytes -= self._items.pop(name).size_bytes
        if len(self._places) > max(_LEAST_PLACES, len(self._items) / (1 - _MOST_REMOVED)):
            self._places = [self._place(each) for each in self._items]
            heapify(self._places)

    def evict(self, until_bytes: int) -> list[NameT]:
        """Removes items, the least first, until the others have at most so many bytes; returns their names.

        For batches, ask for less than the budget: what is evicted together is deleted together.
        """
        gone: list[NameT] = []
        while self.size_bytes > until_bytes and self._items:
            name = self._least()
            heappop(self._places)
            self.size_bytes -= self._items.pop(name).size_bytes
            gone.append(name)
        return gone

    def _least(self) -> NameT:
        """The name of the item that goes next, whose place is then on top. There has to be an item."""
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
