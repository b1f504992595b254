"""Decides which adapters to load and evict for requests, within a byte budget.

It is a state machine that loads nothing itself: the owner of the memory executes `next_load`, and reports with
`finished` or `failed`. By default the item that was used least, among a fixed number of recent uses, is evicted first,
and of equals the least recently used. No clock is involved.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bottega.errors import TooLarge

# Number of remembered uses. Of the last 1000, the least popular ControlNet worth caching in the trace has 66 and the
# next one 17 (Katz, service B). That is too far apart for chance, and covers a few hours of a busy service, so that a
# change of popularity is followed within a day.
WINDOW = 1000

# How many times more popular an absent item must be than all items that it would replace unrequested. With less, two
# items of about the same popularity would replace each other forever.
_WORTH_REPLACING = 2
# Number of claims after which an expected item that was not claimed counts as not expected.
_PATIENCE = 100


class EvictionOrder(Protocol):
    """An order of eviction, computed from the uses of items."""

    def used(self, name: str) -> None:
        """Count a use."""
        ...

    def value(self, name: str) -> tuple[int, int]:
        """Return a sort key; the item with the lowest key is evicted first."""
        ...

    def worth_replacing(self, absent: str, others: Sequence[str]) -> bool:
        """Return whether to load `absent` before any request needs it, in place of the unused items `others`."""
        ...


class Popularity:
    """An EvictionOrder by the number of uses among the last `window` uses of all items, then by the last use."""

    def __init__(self, window: int = WINDOW) -> None:
        self._recent: deque[str] = deque(maxlen=window)
        self._counts: Counter[str] = Counter()
        self._last_use: dict[str, int] = {}
        self._uses = 0

    @property
    def counts(self) -> dict[str, int]:
        """Number of uses in the window by name, the most popular first."""
        return dict(self._counts.most_common())

    def used(self, name: str) -> None:
        """Count a use, and drop the oldest one if the window is full."""
        if len(self._recent) == self._recent.maxlen:
            self._forget(self._recent[0])
        self._recent.append(name)
        self._counts[name] += 1
        self._uses += 1
        self._last_use[name] = self._uses

    def value(self, name: str) -> tuple[int, int]:
        """Return the number of uses in the window, and the time of the last one."""
        return self._counts[name], self._last_use.get(name, 0)

    def worth_replacing(self, absent: str, others: Sequence[str]) -> bool:
        """Return whether `absent` is used at least twice as often as all others together."""
        return self._counts[absent] >= _WORTH_REPLACING * max(1, sum(self._counts[name] for name in others))

    def _forget(self, name: str) -> None:
        self._counts[name] -= 1
        if not self._counts[name]:
            # A name without uses in the window is forgotten, so that names never exceed the window.
            del self._counts[name], self._last_use[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheItem:
    """An item that can be loaded."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCommand:
    """A command to the owner of the memory: drop `evicted`, then load `name`."""

    name: str
    evicted: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class LoadCounts:
    """Counters since the start. A hit is a use that found the item loaded, a miss one that did not."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    failures: int = 0
    evictions: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class LoadClaim:
    """Items that one request needs together."""

    items: tuple[CacheItem, ...]
    granted: bool = False
    """Whether the items are kept in memory, and loaded if they are not."""


@dataclass(slots=True, kw_only=True)
class _KnownItem:
    """An item that was claimed or expected."""

    size_bytes: int
    expected_until: int = 0
    """Number of claims after which the item no longer counts as expected."""
    broken: bool = False
    """Whether the last load of the item failed."""
    failed_loads: int = 0
    """Number of its loads that failed."""
    unneeded: bool = False
    """Whether the item was dropped, so that it is not loaded again only because it was popular."""


class LoadPlan:
    """The plan for items within `budget_bytes`, with one load at a time.

    Items of a granted claim are never evicted. Claims are granted in order, each with all of its items at once, so that
    two requests never wait for each other's items. `order` decides which other items are evicted first. While no claim
    waits, expected items are loaded early, and items that are far more popular than loaded ones are loaded again: an
    unpopular item replaces a popular one only while it is used.
    """

    def __init__(self, budget_bytes: int, order: EvictionOrder) -> None:
        self.counts = LoadCounts()
        self._budget_bytes = budget_bytes
        self._order = order
        self._present: dict[str, None] = {}  # loaded or being loaded, in load order
        self._known: dict[str, _KnownItem] = {}
        self._waiting: list[LoadClaim] = []
        self._users: Counter[str] = Counter()
        self._loading: str | None = None
        self._claims = 0
        self._pinned: frozenset[str] = frozenset()

    @property
    def loaded(self) -> list[str]:
        """Names of loaded items."""
        return [name for name in self._present if name != self._loading]

    @property
    def coming(self) -> list[str]:
        """Names of items that are being loaded or wait to be loaded for a claim."""
        wanted = dict.fromkeys(item.name for claim in self._waiting for item in claim.items) | dict.fromkeys(
            self._users
        )
        loading = [self._loading] if self._loading is not None else []
        return [*loading, *(name for name in wanted if name not in self._present)]

    @property
    def used_bytes(self) -> int:
        """Bytes of the items that are loaded or being loaded."""
        return sum(self._known[name].size_bytes for name in self._present)

    def claim(self, items: Sequence[CacheItem]) -> LoadClaim:
        """Count a use of each item, and claim all of them. Raise TooLarge if they do not fit together."""
        together = sum({item.name: item.size_bytes for item in items}.values())
        if together > self._budget_bytes:
            names = ", ".join(dict.fromkeys(item.name for item in items))
            raise TooLarge(
                f"{names} take {together} bytes together; the budget allows {self._budget_bytes} (budget_bytes)",
                metadata={"limit": "budget_bytes", "budget_bytes": str(self._budget_bytes)},
            )
        self._claims += 1
        for item in items:
            self._order.used(item.name)
            known = self._remember(item)
            known.expected_until, known.unneeded = 0, False
        claim = LoadClaim(items=tuple(items))
        self._waiting.append(claim)
        self._grant()
        return claim

    def release(self, claim: LoadClaim) -> None:
        """End a claim, granted or not."""
        if claim.granted:
            self._users.subtract(item.name for item in claim.items)
            self._users += Counter()  # drops items without users
        else:
            self._waiting.remove(claim)
        self._grant()

    def expect(self, items: Iterable[CacheItem], *, retry: bool = False) -> None:
        """Announce items that queued requests will claim.

        They are loaded early, while no claim waits.

        Args:
            items: The most wanted ones first.
            retry: Whether items whose last load failed are loaded again.
        """
        for item in items:
            if item.size_bytes <= self._budget_bytes:
                known = self._remember(item)
                known.expected_until, known.unneeded = self._claims + _PATIENCE, False
                known.broken = known.broken and not retry

    def pin(self, items: Iterable[CacheItem]) -> None:
        """Count these items, and no others, as always expected: they are loaded early, and evicted last."""
        fitting = [item for item in items if item.size_bytes <= self._budget_bytes]
        for item in fitting:
            self._remember(item).unneeded = False
        self._pinned = frozenset(item.name for item in fitting)

    def drop(self, names: Iterable[str]) -> list[str]:
        """Evict the loaded ones of these items that are neither claimed nor pinned, and return their names."""
        dropped = [name for name in self.loaded if name in set(names) - self._pinned - self._users.keys()]
        for name in dropped:
            del self._present[name]
            known = self._known[name]
            known.expected_until, known.unneeded = 0, True
        self.counts.evictions += len(dropped)
        return dropped

    def next_load(self) -> LoadCommand | None:
        """Return the next load; None during a load, or if there is nothing to load."""
        if self._loading is not None:
            return None
        for name in self._users:
            if name not in self._present:
                # A claim is granted only if all claimed items fit, so only items without a claim can be in the way.
                victims = self._victims(name, self._idle())
                assert victims is not None, "no more is granted than there is room for"
                return self._start_load(name, victims)
        return self._ahead()

    def finished(self, name: str) -> None:
        """Record that the load succeeded."""
        self._known[name].broken = False
        self._loading = None
        self.counts.loads += 1

    def failed(self, name: str) -> None:
        """Record that the load failed. The caller releases its claims, because it is retried only for a new claim."""
        del self._present[name]
        self._known[name].broken = True
        self._known[name].failed_loads += 1
        self._loading = None
        self.counts.failures += 1

    def failed_loads(self, name: str) -> int:
        """Return the number of loads of an item that failed."""
        return self._known[name].failed_loads if name in self._known else 0

    def _remember(self, item: CacheItem) -> _KnownItem:
        known = self._known.setdefault(item.name, _KnownItem(size_bytes=item.size_bytes))
        if item.name not in self._present:  # a loaded item keeps the size that it had when it was loaded
            known.size_bytes = item.size_bytes
        return known

    def _grant(self) -> None:
        loaded = set(self.loaded)
        while self._waiting:
            first = self._waiting[0]
            names = {item.name for item in first.items} | set(self._users)
            if sum(self._known[name].size_bytes for name in names) > self._budget_bytes:
                return
            self._waiting.pop(0)
            first.granted = True
            for item in first.items:
                if item.name in loaded:
                    self.counts.hits += 1
                else:
                    self.counts.misses += 1
                self._users[item.name] += 1

    def _idle(self) -> list[str]:
        """Return the items that may be evicted, in eviction order, with expected ones last."""
        idle = [name for name in self.loaded if name not in self._users]
        return sorted(idle, key=lambda name: (name in self._pinned, self._expected(name), self._order.value(name)))

    def _expected(self, name: str) -> bool:
        return name in self._pinned or self._known[name].expected_until > self._claims

    def _victims(self, name: str, candidates: Sequence[str]) -> list[str] | None:
        """Return the first candidates that must be evicted so that the item fits; None if all do not suffice."""
        lack = self.used_bytes + self._known[name].size_bytes - self._budget_bytes
        victims: list[str] = []
        for candidate in candidates:
            if lack <= 0:
                break
            victims.append(candidate)
            lack -= self._known[candidate].size_bytes
        return victims if lack <= 0 else None

    def _start_load(self, name: str, victims: Sequence[str]) -> LoadCommand:
        for victim in victims:
            del self._present[victim]
        self._present[name] = None
        self._loading = name
        self.counts.evictions += len(victims)
        return LoadCommand(name=name, evicted=tuple(victims))

    def _ahead(self) -> LoadCommand | None:
        """Return an item to load before it is claimed: an expected one, else a popular one; None if there is none."""
        if self._waiting:
            return None  # the waiting claims will need the room
        absent = [
            name
            for name, known in self._known.items()
            if name not in self._present
            and not known.broken
            and not known.unneeded
            and (self._expected(name) or self._order.worth_replacing(name, ()))
        ]
        idle = [name for name in self._idle() if not self._expected(name)]
        for name in sorted(absent, key=lambda name: (self._expected(name), self._order.value(name)), reverse=True):
            victims = self._victims(name, idle)
            if victims is not None and (self._expected(name) or self._order.worth_replacing(name, victims)):
                return self._start_load(name, victims)
        return None
