"""Within a byte budget: which adapters to load and evict for the leases that requests hold.

A state machine that loads nothing itself: whoever owns the memory asks `next_load`, obeys, and says what came of
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bottega.caching.popularity import EvictionOrder
from bottega.errors import TooLarge

# Loans after which something that was expected and never borrowed counts like everything else.
_PATIENCE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheItem:
    """Something that can be on the shelf."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCommand:
    """An order to the owner of the memory: first forget `evicted`, then load `name`."""

    name: str
    evicted: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class LoadCounts:
    """What has happened since the start. hits, misses: uses that found the item loaded, or did not."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    failures: int = 0
    evictions: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class LoadClaim:
    """Items that one request borrows together. granted: they stay, and are loaded as far as they are not yet."""

    items: tuple[CacheItem, ...]
    granted: bool = False


@dataclass(slots=True, kw_only=True)
class _Residence:
    """An item that is loaded or being loaded."""

    size_bytes: int
    loaded: bool = False


@dataclass(slots=True, kw_only=True)
class _KnownItem:
    """An item that somebody has asked for. expected_until: by number of loans. broken: its last load failed."""

    size_bytes: int
    expected_until: int = 0
    broken: bool = False


class LoadPlan:
    """Items within `budget_bytes`, one load at a time.

    Items on loan are never let go. Loans are granted in their order, each with all its items at once, so that two
    requests never wait for each other's. Of what is not on loan, `order` says what goes first. When nobody waits,
    what is expected is loaded ahead, and what is far more popular than what is here comes back: an unpopular item
    takes the place of a popular one only while it is used.
    """

    def __init__(self, budget_bytes: int, order: EvictionOrder) -> None:
        self.counts = LoadCounts()
        self._budget_bytes = budget_bytes
        self._order = order
        self._places: dict[str, _Residence] = {}
        self._known: dict[str, _KnownItem] = {}
        self._waiting: list[LoadClaim] = []
        self._users: Counter[str] = Counter()
        self._loading: str | None = None
        self._lent = 0

    @property
    def loaded(self) -> list[str]:
        """Names of what is loaded."""
        return [name for name, place in self._places.items() if place.loaded]

    @property
    def coming(self) -> list[str]:
        """Names of what is not loaded and will be as soon as it can: what is being loaded, or was asked for."""
        wanted = dict.fromkeys(item.name for loan in self._waiting for item in loan.items) | dict.fromkeys(self._users)
        loading = [self._loading] if self._loading is not None else []
        return [*loading, *(name for name in wanted if name not in self._places)]

    @property
    def used_bytes(self) -> int:
        """Of what is loaded or being loaded."""
        return sum(place.size_bytes for place in self._places.values())

    def borrow(self, items: Sequence[CacheItem]) -> LoadClaim:
        """Counts a use of each and begins a loan of all of them.

        Raises TooLarge when they can never be here together.
        """
        together = sum({item.name: item.size_bytes for item in items}.values())
        if together > self._budget_bytes:
            names = ", ".join(dict.fromkeys(item.name for item in items))
            raise TooLarge(
                f"{names} take {together} bytes together; there is room for {self._budget_bytes} (budget_bytes)",
                metadata={"limit": "budget_bytes", "budget_bytes": str(self._budget_bytes)},
            )
        self._lent += 1
        for item in items:
            self._order.used(item.name)
            self._know(item).expected_until = 0
        loan = LoadClaim(items=tuple(items))
        self._waiting.append(loan)
        self._grant()
        return loan

    def give_back(self, loan: LoadClaim) -> None:
        """Ends a loan, granted or not."""
        if loan.granted:
            self._users.subtract(item.name for item in loan.items)
            self._users += Counter()  # drops those without users
        else:
            self._waiting.remove(loan)
        self._grant()

    def expect(self, items: Iterable[CacheItem]) -> None:
        """Requests that wait elsewhere will borrow these: they are loaded ahead while nobody here waits."""
        for item in items:
            if item.size_bytes <= self._budget_bytes:
                self._know(item).expected_until = self._lent + _PATIENCE

    def next_load(self) -> LoadCommand | None:
        """What to load now; None while something is being loaded, or nothing is to be."""
        if self._loading is not None:
            return None
        for name in self._users:
            if name not in self._places:
                # Granted only where all that is on loan has room: what is in the way is not on loan.
                victims = self._victims(name, self._idle())
                assert victims is not None, "no more is lent than there is room for"
                return self._begin(name, victims)
        return self._ahead()

    def finished(self, name: str) -> None:
        """The load has succeeded."""
        self._places[name].loaded = True
        self._known[name].broken = False
        self._loading = None
        self.counts.loads += 1

    def failed(self, name: str) -> None:
        """The load has failed: it is tried again only for those who ask anew, so the caller ends the loans of it."""
        del self._places[name]
        self._known[name].broken = True
        self._loading = None
        self.counts.failures += 1

    def _know(self, item: CacheItem) -> _KnownItem:
        known = self._known.setdefault(item.name, _KnownItem(size_bytes=item.size_bytes))
        if item.name not in self._places:  # what is here has the size that it had when it was loaded
            known.size_bytes = item.size_bytes
        return known

    def _grant(self) -> None:
        """Grants loans, first come first served, while all that is on loan has room together."""
        while self._waiting:
            first = self._waiting[0]
            names = {item.name for item in first.items} | set(self._users)
            if sum(self._known[name].size_bytes for name in names) > self._budget_bytes:
                return
            self._waiting.pop(0)
            first.granted = True
            for item in first.items:
                place = self._places.get(item.name)
                if place is not None and place.loaded:
                    self.counts.hits += 1
                else:
                    self.counts.misses += 1
                self._users[item.name] += 1

    def _idle(self) -> list[str]:
        """What may be let go, the first to go first: what is expected goes last."""
        idle = [name for name, place in self._places.items() if place.loaded and name not in self._users]
        return sorted(idle, key=lambda name: (self._expected(name), self._order.value(name)))

    def _expected(self, name: str) -> bool:
        return self._known[name].expected_until > self._lent

    def _victims(self, name: str, candidates: Sequence[str]) -> list[str] | None:
        """Whom of `candidates`, in their order, the item takes the place of; None where it has no room even so."""
        lack = self.used_bytes + self._known[name].size_bytes - self._budget_bytes
        victims: list[str] = []
        for candidate in candidates:
            if lack <= 0:
                break
            victims.append(candidate)
            lack -= self._places[candidate].size_bytes
        return victims if lack <= 0 else None

    def _begin(self, name: str, victims: Sequence[str]) -> LoadCommand:
        for victim in victims:
            del self._places[victim]
        self._places[name] = _Residence(size_bytes=self._known[name].size_bytes)
        self._loading = name
        self.counts.evictions += len(victims)
        return LoadCommand(name=name, evicted=tuple(victims))

    def _ahead(self) -> LoadCommand | None:
        """What to load though nobody waits for it: what is expected, then what is worth it."""
        if self._waiting:
            return None  # room will be needed for those
        absent = [
            name
            for name, known in self._known.items()
            if name not in self._places
            and not known.broken
            and (self._expected(name) or self._order.worth_replacing(name, ()))
        ]
        idle = [name for name in self._idle() if not self._expected(name)]
        for name in sorted(absent, key=lambda name: (self._expected(name), self._order.value(name)), reverse=True):
            victims = self._victims(name, idle)
            if victims is not None and (self._expected(name) or self._order.worth_replacing(name, victims)):
                return self._begin(name, victims)
        return None
