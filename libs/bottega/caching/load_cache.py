"""A cache of values, such as adapter weights: one thread loads them within a byte budget, and many callers lease them.

LoadPlan decides what is loaded and evicted, and when; this module executes the decisions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from bottega.caching.load_plan import CacheItem, LoadClaim, LoadCommand, LoadCounts, LoadPlan, Popularity
from bottega.errors import BottegaError, Draining, InternalError

ValueT = TypeVar("ValueT")
LoadedT_co = TypeVar("LoadedT_co", covariant=True)

_log = logging.getLogger(__name__)

# A running load cannot be interrupted. What it loaded is dropped with the process.
_STOP_S = 30.0
# Number of values, the last loaded, whose loading times or errors are known.
_MAX_TIMES = 1000


class Loader(Protocol[LoadedT_co]):
    """Loads values for a LoadCache. `what` is what a value is called in error messages."""

    what: str

    def size_bytes(self, name: str) -> int:
        """Return a value's bytes in memory. Raise BottegaError if there is no such value. Thread-safe."""
        ...

    def load(self, name: str) -> LoadedT_co:
        """Load a value, in the cache's thread. Raise BottegaError with the reason if it cannot be loaded."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Lease(Generic[ValueT]):
    """The values that one request has leased, so that they are not evicted.

    `values` is a future, whose result is the values in the requested order, or the BottegaError if one cannot be
    loaded.
    """

    claim: LoadClaim
    values: Future[tuple[ValueT, ...]] = field(default_factory=Future)


class LoadCache(Generic[ValueT]):
    """A cache that loads values on demand. Calls are thread-safe and do not wait for loads.

    Args:
        popularity: Determines the order of eviction.
    """

    def __init__(self, loader: Loader[ValueT], *, budget_bytes: int, popularity: Popularity | None = None) -> None:
        self._loader = loader
        self._popularity = popularity or Popularity()
        self._plan = LoadPlan(budget_bytes, self._popularity)
        self._values: dict[str, ValueT] = {}
        self._leases: list[Lease[ValueT]] = []
        self._changed = threading.Condition()
        self._load_s: dict[str, float] = {}
        self._errors: dict[str, str] = {}
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
        """Number of recent uses by name, the most popular first."""
        with self._changed:
            return self._popularity.counts

    @property
    def loaded(self) -> list[str]:
        """Names of loaded values."""
        with self._changed:
            return self._plan.loaded

    @property
    def coming(self) -> list[str]:
        """Names of values that are being loaded or wait to be loaded for a lease."""
        with self._changed:
            return self._plan.coming

    @property
    def used_bytes(self) -> int:
        """Bytes of the values that are loaded or being loaded."""
        with self._changed:
            return self._plan.used_bytes

    def borrow(self, names: Sequence[str]) -> Lease[ValueT]:
        """Lease these values together. The lease's future completes when all are loaded.

        Raises the loader's errors, TooLarge if they do not fit together, and Draining once the cache is closed.
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
        """End a lease. Do nothing if it has ended."""
        with self._changed:
            if lease in self._leases:
                self._leases.remove(lease)
                self._plan.release(lease.claim)
                self._serve_leases()
                self._changed.notify()
        lease.values.cancel()

    def expect(self, names: Iterable[str], *, retry: bool = False) -> None:
        """Announce values that queued requests will lease, so that they are loaded early. Unknown names are ignored.

        Args:
            names: Names of the values.
            retry: Whether values whose last load failed are loaded again.
        """
        items = []
        for name in names:
            try:
                items.append(self._item(name))
            except BottegaError:
                continue
        with self._changed:
            self._plan.expect(items, retry=retry)
            self._changed.notify()

    def pin(self, names: Iterable[str]) -> None:
        """Keep these values, and no others, in memory: they are loaded early, and evicted last."""
        items = [self._item(name) for name in names]
        with self._changed:
            self._plan.pin(items)
            self._changed.notify()

    def drop(self, names: Iterable[str]) -> None:
        """Evict these values, unless they are leased or pinned. Unknown names are ignored."""
        with self._changed:
            for name in self._plan.drop(names):
                del self._values[name]
            self._changed.notify()

    def load_s(self, name: str) -> float:
        """Return the seconds that the last load of a value took; 0 if it was never loaded."""
        return self._load_s.get(name, 0.0)

    def load_error(self, name: str) -> str:
        """Return why the last load of a value failed; empty if it did not."""
        return self._errors.get(name, "")

    def failed_loads(self, name: str) -> int:
        """Return the number of loads of a value that failed."""
        with self._changed:
            return self._plan.failed_loads(name)

    def close(self) -> None:
        """Stop loading, and fail the leases that wait for a load."""
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
        return Draining(f"the {self._loader.what}s of this process are being unloaded, because it stops")

    def _load_all(self) -> None:
        while (command := self._next()) is not None:
            self._load(command.name)

    def _load(self, name: str) -> None:
        """Load one value. A function of its own, so that no reference to the value remains during the next load."""
        try:
            began_s = time.monotonic()
            value = self._loader.load(name)
            self._load_s.pop(name, None)
            self._load_s[name] = time.monotonic() - began_s
            if len(self._load_s) > _MAX_TIMES:
                del self._load_s[next(iter(self._load_s))]
        except Exception as error:  # noqa: BLE001 - the boundary of a load: those that wait get its error
            self._on_failed(name, error)
        else:
            self._on_loaded(name, value)

    def _next(self) -> LoadCommand | None:
        """Wait for the next load, and drop the values that are evicted for it. Return None once the cache is closed."""
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
            self._errors.pop(name, None)
            self._values[name] = value
            self._serve_leases()

    def _on_failed(self, name: str, error: Exception) -> None:
        what = self._loader.what
        reported = error if isinstance(error, BottegaError) else InternalError(f"the {what} {name} cannot be loaded")
        facts = {"entry": name, "why": str(error)}
        _log.error("a %s cannot be loaded", what, extra=facts, exc_info=reported is not error)
        with self._changed:
            self._plan.failed(name)
            self._errors.pop(name, None)
            self._errors[name] = reported.message
            if len(self._errors) > _MAX_TIMES:
                del self._errors[next(iter(self._errors))]
            for lease in list(self._leases):
                if lease.claim.granted and any(item.name == name for item in lease.claim.items):
                    self._fail(lease, reported)

    def _serve_leases(self) -> None:
        """Set the result of every lease whose values are all loaded."""
        for lease in self._leases:
            names = [item.name for item in lease.claim.items]
            if lease.claim.granted and not lease.values.done() and all(name in self._values for name in names):
                lease.values.set_result(tuple(self._values[name] for name in names))

    def _fail(self, lease: Lease[ValueT], error: BottegaError) -> None:
        self._leases.remove(lease)
        self._plan.release(lease.claim)
        lease.values.set_exception(error)
