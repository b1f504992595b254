"""The ControlNets that are loaded: a thread loads what a planning.LoadCache says, beside sessions that run.

Knows sources, devices and threads; knows no sessions and no rows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch

from bottega.diffusion.controlnets.network import ControlNet, ControlNetSource, load_controlnet
from bottega.diffusion.errors import named
from bottega.errors import BottegaError, ControlNetNotFound, Draining
from bottega.planning import CacheItem, LoadCache, LoadCommand, LoadCounts, LoadLease, Popularity

_log = logging.getLogger(__name__)

# A load that has begun cannot be broken off; what it loaded is dropped with the process.
_STOP_S = 30.0


@dataclass(slots=True, kw_only=True, eq=False)
class ControlNetLease:
    """The ControlNets that one request has borrowed. They are there when `nets` has a result, in the order asked for.

    Its exception is the BottegaError for which one of them cannot be.
    """

    loan: LoadLease
    nets: Future[tuple[ControlNet, ...]] = field(default_factory=Future)


class ControlNetCache:
    """Loads ControlNets within `budget_bytes` and lets them go; any thread may call it, and no call waits for a load.

    sources: by name; may grow while the shelf is open. popularity: in what order they are let go.
    load: makes a ControlNet of a source, in the shelf's own thread; raises BottegaError saying why not.
    """

    def __init__(
        self,
        sources: Mapping[str, ControlNetSource],
        *,
        budget_bytes: int,
        device: torch.device,
        popularity: Popularity | None = None,
        load: Callable[[ControlNetSource, torch.device], ControlNet] = load_controlnet,
    ) -> None:
        self._sources = sources
        self._device = device
        self._load = load
        self._popularity = popularity or Popularity()
        self._shelf = LoadCache(budget_bytes, self._popularity)
        self._nets: dict[str, ControlNet] = {}
        self._holds: list[ControlNetLease] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="controlnet-loads", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> LoadCounts:
        """Hits, misses, loads, failures and evictions since the start."""
        with self._changed:
            return replace(self._shelf.counts)

    @property
    def popularity(self) -> dict[str, int]:
        """Uses among the last ones, by name, the most popular first."""
        with self._changed:
            return self._popularity.counts

    @property
    def loaded(self) -> list[str]:
        """Names of the ControlNets that are loaded."""
        with self._changed:
            return self._shelf.loaded

    @property
    def coming(self) -> list[str]:
        """Names of those that are on their way, or wait for it because somebody has asked for them."""
        with self._changed:
            return self._shelf.coming

    @property
    def used_bytes(self) -> int:
        """Of those that are loaded or being loaded."""
        with self._changed:
            return self._shelf.used_bytes

    def borrow(self, names: Sequence[str]) -> ControlNetLease:
        """Begins a loan of these, together.

        Raises ControlNetNotFound, TooLarge where they have no room together, and Draining once it is closed.
        """
        items = [_item(self._source(name)) for name in names]
        with self._changed:
            if self._closed:
                raise Draining("the ControlNets of this process are being put away")
            hold = ControlNetLease(loan=self._shelf.borrow(items))
            self._holds.append(hold)
            self._answer()
            self._changed.notify()
        return hold

    def give_back(self, hold: ControlNetLease) -> None:
        """Ends a loan. Harmless when it has ended."""
        with self._changed:
            if hold in self._holds:
                self._holds.remove(hold)
                self._shelf.give_back(hold.loan)
                self._answer()
                self._changed.notify()
        hold.nets.cancel()

    def expect(self, names: Iterable[str]) -> None:
        """Requests that wait elsewhere will borrow these. Names that are not known are left out."""
        # Looked up once each: another thread may host another version of one meanwhile.
        items = [_item(source) for name in names if (source := self._sources.get(name)) is not None]
        with self._changed:
            self._shelf.expect(items)
            self._changed.notify()

    def close(self) -> None:
        """Ends the loads and fails the loans that wait for one."""
        with self._changed:
            self._closed = True
            for hold in [hold for hold in self._holds if not hold.nets.done()]:
                self._fail(hold, Draining("the ControlNets of this process are being put away"))
            self._changed.notify()
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._nets.clear()

    def _source(self, name: str) -> ControlNetSource:
        source = self._sources.get(name)
        if source is None:
            served = ", ".join(sorted(self._sources))
            raise ControlNetNotFound(f"there is no ControlNet {name!r} here", metadata={"served": served})
        return source

    def _serve(self) -> None:
        while (load := self._next()) is not None:
            try:
                net = self._load(self._source(load.name), self._device)
            except BottegaError as error:
                _log.error("a ControlNet cannot be loaded", extra={"controlnet": load.name, "why": str(error)})
                self._missed(load.name, error)
            except Exception as error:  # noqa: BLE001 - the boundary of a load: its failure is told to those who wait
                self._missed(load.name, named(error))
            else:
                self._arrived(load.name, net)

    def _next(self) -> LoadCommand | None:
        """Waits for the next load and forgets what makes room for it; None once the shelf is closed."""
        with self._changed:
            while not self._closed:
                load = self._shelf.next_load()
                if load is not None:
                    for name in load.evicted:
                        del self._nets[name]
                    return load
                self._changed.wait()
        return None

    def _arrived(self, name: str, net: ControlNet) -> None:
        with self._changed:
            self._shelf.finished(name)
            self._nets[name] = net
            self._answer()

    def _missed(self, name: str, error: BottegaError) -> None:
        with self._changed:
            self._shelf.failed(name)
            for hold in list(self._holds):
                if hold.loan.granted and any(item.name == name for item in hold.loan.items):
                    self._fail(hold, error)

    def _answer(self) -> None:
        """Hands the nets to every loan whose nets are all here."""
        for hold in self._holds:
            names = [item.name for item in hold.loan.items]
            if hold.loan.granted and not hold.nets.done() and all(name in self._nets for name in names):
                hold.nets.set_result(tuple(self._nets[name] for name in names))

    def _fail(self, hold: ControlNetLease, error: BottegaError) -> None:
        self._holds.remove(hold)
        self._shelf.give_back(hold.loan)
        hold.nets.set_exception(error)


def _item(source: ControlNetSource) -> CacheItem:
    return CacheItem(name=source.name, size_bytes=source.size_bytes)
