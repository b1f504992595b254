"""Within a byte budget: which adapters to load and evict for the claims of requests.

A state machine that loads nothing itself: the owner of the memory does what `next_load` says, and reports with
`finished` or `failed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bottega.caching.popularity import EvictionOrder
from bottega.errors import TooLarge

# Claims after which something that was expected and never claimed counts like everything else.
_PATIENCE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheItem:
    """Something that can be loaded."""

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
    """Items that one request needs together. granted: they stay, and are loaded as far as they are not yet."""

    items: tuple[CacheItem, ...]
    granted: bool = False


@dataclass(slots=True, kw_only=True)
class _KnownItem:
    """An item that was claimed or expected. expected_until: by number of claims. broken: its last load failed."""

    size_bytes: int
    expected_until: int = 0
    broken: bool = False


class LoadPlan:
    """Items within `budget_bytes`, one load at a time.

    Items of a granted claim are never evicted. Claims are granted in their order, each with all its items at once, so
    that two requests never wait for each other's. Of the other items, `order` says what goes first. When nobody waits,
    what is expected is loaded ahead, and what is far more popular than what is loaded comes back: an unpopular item
    takes the place of a popular one only while it is used.
    """

    def __init__(self, budget_bytes: int, order: EvictionOrder) -> None:
        self.counts = LoadCounts()
        self._budget_bytes = budget_bytes
        self._order = order
        self._present: dict[str, None] = {}  # loaded, or being loaded, in the order of their loads
        self._known: dict[str, _KnownItem] = {}
        self._waiting: list[LoadClaim] = []
        self._users: Counter[str] = Counter()
        self._loading: str | None = None
        self._claims = 0

    @property
    def loaded(self) -> list[str]:
        """Names of what is loaded."""
        return [name for name in self._present if name != self._loading]

    @property
    def coming(self) -> list[str]:
        """Names of what is not loaded and will be as soon as it can: what is being loaded, or was asked for."""
        wanted = dict.fromkeys(item.name for claim in self._waiting for item in claim.items) | dict.fromkeys(
            self._users
        )
        loading = [self._loading] if self._loading is not None else []
        return [*loading, *(name for name in wanted if name not in self._present)]

    @property
    def used_bytes(self) -> int:
        """Of what is loaded or being loaded."""
        return sum(self._known[name].size_bytes for name in self._present)

    def claim(self, items: Sequence[CacheItem]) -> LoadClaim:
        """Counts a use of each, and claims all of them.

        Raises TooLarge when they can never be here together.
        """
        together = sum({item.name: item.size_bytes for item in items}.values())
        if together > self._budget_bytes:
            names = ", ".join(dict.fromkeys(item.name for item in items))
            raise TooLarge(
                f"{names} take {together} bytes together; there is room for {self._budget_bytes} (budget_bytes)",
                metadata={"limit": "budget_bytes", "budget_bytes": str(self._budget_bytes)},
            )
        self._claims += 1
        for item in items:
            self._order.used(item.name)
            self._remember(item).expected_until = 0
        claim = LoadClaim(items=tuple(items))
        self._waiting.append(claim)
        self._grant()
        return claim

    def release(self, claim: LoadClaim) -> None:
        """Ends a claim, granted or not."""
        if claim.granted:
            self._users.subtract(item.name for item in claim.items)
            self._users += Counter()  # drops those without users
        else:
            self._waiting.remove(claim)
        self._grant()

    def expect(self, items: Iterable[CacheItem]) -> None:
        """Requests that wait elsewhere will claim these: they are loaded ahead while nobody here waits."""
        for item in items:
            if item.size_bytes <= self._budget_bytes:
                self._remember(item).expected_until = self._claims + _PATIENCE

    def next_load(self) -> LoadCommand | None:
        """What to load now; None while something is being loaded, or nothing is to be."""
        if self._loading is not None:
            return None
        for name in self._users:
            if name not in self._present:
                # Granted only where all that is claimed has room: what is in the way has no claim.
                victims = self._victims(name, self._idle())
                assert victims is not None, "no more is granted than there is room for"
                return self._start_load(name, victims)
        return self._ahead()

    def finished(self, name: str) -> None:
        """The load has succeeded."""
        self._known[name].broken = False
        self._loading = None
        self.counts.loads += 1

    def failed(self, name: str) -> None:
        """The load has failed: it is tried again only for a new request, so the caller releases its claims."""
        del self._present[name]
        self._known[name].broken = True
        self._loading = None
        self.counts.failures += 1

    def _remember(self, item: CacheItem) -> _KnownItem:
        known = self._known.setdefault(item.name, _KnownItem(size_bytes=item.size_bytes))
        if item.name not in self._present:  # what is here has the size that it had when it was loaded
            known.size_bytes = item.size_bytes
        return known

    def _grant(self) -> None:
        """Grants claims, first come first served, while all that is granted has room together."""
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
        """What may be let go, the first to go first: what is expected goes last."""
        idle = [name for name in self.loaded if name not in self._users]
        return sorted(idle, key=lambda name: (self._expected(name), self._order.value(name)))

    def _expected(self, name: str) -> bool:
        return self._known[name].expected_until > self._claims

    def _victims(self, name: str, candidates: Sequence[str]) -> list[str] | None:
        """Whom of `candidates`, in their order, the item takes the place of; None where it has no room even so."""
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
        """What to load though nobody waits for it: what is expected, then what is worth it."""
        if self._waiting:
            return None  # room will be needed for those
        absent = [
            name
            for name, known in self._known.items()
            if name not in self._present
            and not known.broken
            and (self._expected(name) or self._order.worth_replacing(name, ()))
        ]
        idle = [name for name in self._idle() if not self._expected(name)]
        for name in sorted(absent, key=lambda name: (self._expected(name), self._order.value(name)), reverse=True):
            victims = self._victims(name, idle)
            if victims is not None and (self._expected(name) or self._order.worth_replacing(name, victims)):
                return self._start_load(name, victims)
        return None
