"""Values, such as weights of adapters, that one thread loads within a budget of bytes, and that many borrow.

What is loaded and let go, and when, is decided by LoadPlan; this carries it out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from bottega.caching.load_plan import CacheItem, LoadClaim, LoadCommand, LoadCounts, LoadPlan
from bottega.caching.popularity import Popularity
from bottega.errors import BottegaError, Draining, InternalError

ValueT = TypeVar("ValueT")
LoadedT_co = TypeVar("LoadedT_co", covariant=True)

_log = logging.getLogger(__name__)

# A load that has begun cannot be broken off; what it loaded is dropped with the process.
_STOP_S = 30.0


class Loader(Protocol[LoadedT_co]):
    """What there is to be loaded. what: one of it is, for people."""

    what: str

    def size_bytes(self, name: str) -> int:
        """That it takes in memory. Raises BottegaError where there is none of that name. Any thread may ask."""
        ...

    def load(self, name: str) -> LoadedT_co:
        """Loads it, in the cache's thread. Raises BottegaError saying why it cannot be."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Lease(Generic[ValueT]):
    """What one request has borrowed. Its values are there when `values` has a result, in the order asked for.

    Its exception is the BottegaError for which one of them cannot be.
    """

    claim: LoadClaim
    values: Future[tuple[ValueT, ...]] = field(default_factory=Future)


class LoadCache(Generic[ValueT]):
    """Any thread may call it, and no call waits for a load. popularity: in what order values are let go."""

    def __init__(self, loader: Loader[ValueT], *, budget_bytes: int, popularity: Popularity | None = None) -> None:
        self._loader = loader
        self._popularity = popularity or Popularity()
        self._plan = LoadPlan(budget_bytes, self._popularity)
        self._values: dict[str, ValueT] = {}
        self._leases: list[Lease[ValueT]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._load_all, name=f"{loader.what} loads", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> LoadCounts:
        """Hits, misses, loads, failures and evictions since the start."""
        with self._changed:
            return replace(self._plan.counts)

    @property
    def popularity(self) -> dict[str, int]:
        """Uses among the last ones, by name, the most popular first."""
        with self._changed:
            return self._popularity.counts

    @property
    def loaded(self) -> list[str]:
        """Names of what is loaded."""
        with self._changed:
            return self._plan.loaded

    @property
    def coming(self) -> list[str]:
        """Names of what is being loaded, or waits for it because somebody has asked."""
        with self._changed:
            return self._plan.coming

    @property
    def used_bytes(self) -> int:
        """Of what is loaded or being loaded."""
        with self._changed:
            return self._plan.used_bytes

    def borrow(self, names: Sequence[str]) -> Lease[ValueT]:
        """Begins a lease of these, together.

        Raises what the loader says of a name, TooLarge where they have no room together, Draining once it is closed.
        """
        items = [self._item(name) for name in names]
        with self._changed:
            if self._closed:
                raise self._closing()
            lease: Lease[ValueT] = Lease(claim=self._plan.claim(items))
            self._leases.append(lease)
            self._serve_leases()
            self._changed.notify()
        return lease

    def give_back(self, lease: Lease[ValueT]) -> None:
        """Ends a lease. Harmless when it has ended."""
        with self._changed:
            if lease in self._leases:
                self._leases.remove(lease)
                self._plan.release(lease.claim)
                self._serve_leases()
                self._changed.notify()
        lease.values.cancel()

    def expect(self, names: Iterable[str]) -> None:
        """Requests that wait elsewhere will borrow these. Names that are not known are left out."""
        items = []
        for name in names:
            try:
                items.append(self._item(name))
            except BottegaError:
                continue
        with self._changed:
            self._plan.expect(items)
            self._changed.notify()

    def close(self) -> None:
        """Ends the loads and fails the leases that wait for one."""
        with self._changed:
            self._closed = True
            for lease in [lease for lease in self._leases if not lease.values.done()]:
                self._fail(lease, self._closing())
            self._changed.notify()
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._values.clear()

    def _item(self, name: str) -> CacheItem:
        return CacheItem(name=name, size_bytes=self._loader.size_bytes(name))

    def _closing(self) -> Draining:
        return Draining(f"the {self._loader.what}s of this process are being closed")

    def _load_all(self) -> None:
        while (command := self._next()) is not None:
            self._load(command.name)

    def _load(self, name: str) -> None:
        """By itself, so that nothing is kept of one value while the next one is loaded."""
        try:
            value = self._loader.load(name)
        except Exception as error:  # noqa: BLE001 - the boundary of a load: those that wait get its error
            self._on_failed(name, error)
        else:
            self._on_loaded(name, value)

    def _next(self) -> LoadCommand | None:
        """Waits for the next load and forgets what makes room for it; None once the cache is closed."""
        with self._changed:
            while not self._closed:
                command = self._plan.next_load()
                if command is not None:
                    for name in command.evicted:
                        del self._values[name]
                    return command
                self._changed.wait()
        return None

    def _on_loaded(self, name: str, value: ValueT) -> None:
        with self._changed:
            self._plan.finished(name)
            self._values[name] = value
            self._serve_leases()

    def _on_failed(self, name: str, error: Exception) -> None:
        what = self._loader.what
        told = error if isinstance(error, BottegaError) else InternalError(f"the {what} {name} cannot be loaded")
        _log.error("a %s cannot be loaded", what, extra={"entry": name, "why": str(error)}, exc_info=told is not error)
        with self._changed:
            self._plan.failed(name)
            for lease in list(self._leases):
                if lease.claim.granted and any(item.name == name for item in lease.claim.items):
                    self._fail(lease, told)

    def _serve_leases(self) -> None:
        """Hands the values to every lease whose values are all here."""
        for lease in self._leases:
            names = [item.name for item in lease.claim.items]
            if lease.claim.granted and not lease.values.done() and all(name in self._values for name in names):
                lease.values.set_result(tuple(self._values[name] for name in names))

    def _fail(self, lease: Lease[ValueT], error: BottegaError) -> None:
        self._leases.remove(lease)
        self._plan.release(lease.claim)
        lease.values.set_exception(error)
