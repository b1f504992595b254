"""How often is a ControlNet loaded when a request needs it, by budget: the suite's way, LRU and LFU?

A simulation of the state machine that servers and workers run, on the popularity of a production trace: requests come
one after the other, as caches are compared; and, where it is judged, at random at the trace's mean rate, all of a
service on one server, where requests and loads overlap. All orders see the same requests.

A run takes 1 minute on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from pathlib import Path

from bottega.caching.load_plan import CacheItem, EvictionOrder, LoadClaim, LoadPlan, Popularity
from load.bench.framework import Bench, Option, Sheet
from load.replay.arrivals import poisson
from load.replay.trace_shape import CONTROLNETS, AdapterCalls

# Reading 2.5 GB, an SDXL ControlNet in half precision, from a good disk; and the time of a picture with one.
LOAD_S = 2.5
USE_S = 5.0
# So rarely that nothing overlaps.
ONE_BY_ONE_PER_S = 1e-6
# Requests up to this share of them teach the orders and are not counted.
LEARNING = 0.2
# The most popular ControlNets that have room where the bar is.
JUDGED = {"A": 5, "B": 8}
# How far below the share of their calls the hits may be.
BOUND = 0.01
BUDGETS = {"A": (3, 4, 5, 6, 8, 12), "B": (3, 5, 8, 10, 12, 16)}
BENCH = Bench(__file__, __doc__, Option("--requests", 10_000, "drawn for each row", smallest=200))


class LeastRecentlyUsed:
    """An EvictionOrder that evicts the item that was used longest ago."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._clock = itertools.count(1)

    def used(self, name: str) -> None:
        self._last[name] = next(self._clock)

    def value(self, name: str) -> tuple[int, int]:
        return self._last.get(name, 0), 0

    def worth_replacing(self, absent: str, others: Sequence[str]) -> bool:
        return False


class LeastFrequentlyUsed:
    """An EvictionOrder that evicts the item that was used least since the beginning."""

    def __init__(self) -> None:
        self._uses: Counter[str] = Counter()

    def used(self, name: str) -> None:
        self._uses[name] += 1

    def value(self, name: str) -> tuple[int, int]:
        return self._uses[name], 0

    def worth_replacing(self, absent: str, others: Sequence[str]) -> bool:
        return False


ORDERS: dict[str, Callable[[], EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "ours": Popularity,
}


@dataclass(slots=True, kw_only=True)
class Replay:
    """A load plan on a clock of its own."""

    plan: LoadPlan
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _now_s: float = 0.0
    _claims: list[LoadClaim] = field(default_factory=list)

    def request(self, at_s: float, names: Sequence[str]) -> None:
        """Let a request arrive; requests come in their order."""
        self._run(at_s)
        self._claims.append(self.plan.claim([CacheItem(name=name, size_bytes=1) for name in names]))
        self._proceed()

    def _run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self._now_s, _, happen = heappop(self._events)
            happen()
            self._proceed()
        self._now_s = until_s

    def _proceed(self) -> None:
        """Start the load that is due, and the pictures whose ControlNets are here."""
        load = self.plan.next_load()
        if load is not None:
            self._after(LOAD_S, partial(self.plan.finished, load.name))
        here = set(self.plan.loaded)
        for claim in [
            claim for claim in self._claims if claim.granted and all(item.name in here for item in claim.items)
        ]:
            self._claims.remove(claim)
            self._after(USE_S, partial(self.plan.release, claim))

    def _after(self, delay_s: float, happen: Callable[[], None]) -> None:
        heappush(self._events, (self._now_s + delay_s, next(self._order), happen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The counts of a replay, as shares of its calls."""

    misses: float
    loads: float


def replay(service: AdapterCalls, order: EvictionOrder, *, places: int, requests: int, rate_per_s: float) -> Outcome:
    """Replay requests of a service, the same for every order."""
    run = Replay(plan=LoadPlan(places, order))
    drawn = itertools.islice(service.calls(random.Random(service.name)), requests)
    arrivals = poisson(rate_per_s, requests, random.Random(1))
    learnt = int(LEARNING * requests)
    before = (0, 0, 0)
    for index, (at_s, ranks) in enumerate(zip(arrivals, drawn, strict=True)):
        if index == learnt:
            before = _counts(run.plan)
        run.request(at_s, [f"{service.name}{rank}" for rank in ranks])
    hits, misses, loads = (after - then for after, then in zip(_counts(run.plan), before, strict=True))
    return Outcome(misses=misses / (hits + misses), loads=loads / (hits + misses))


def _counts(plan: LoadPlan) -> tuple[int, int, int]:
    return plan.counts.hits, plan.counts.misses, plan.counts.loads


def _measure(service: AdapterCalls, requests: int, sheet: Sheet) -> None:
    judged = JUDGED[service.name]
    share = service.top_share(judged)
    prefix = service.name.lower()
    for places in BUDGETS[service.name]:
        seen = _orders(service, places, requests, ONE_BY_ONE_PER_S)
        wanted = f"ours at most {1 - share + BOUND:.1%}" if places == judged else ""
        sheet.row(f"misses, service {service.name}, room for {places}", _shown(seen, "misses"), wanted)
        if places == judged:
            sheet.row("  loads for each call there", _shown(seen, "loads"))
            sheet.values |= {f"{prefix}_{name}_misses": outcome.misses for name, outcome in seen.items()}
            sheet.values[f"{prefix}_loss_points"] = 100 * (share - (1 - seen["ours"].misses))
            busy = _orders(service, places, requests, service.rate_per_s)
            what = f"  misses there, all of service {service.name} on one server"
            sheet.row(what, _shown(busy, "misses"))
            sheet.values[f"{prefix}_busy_loss_points"] = 100 * (share - (1 - busy["ours"].misses))


def _orders(service: AdapterCalls, places: int, requests: int, rate_per_s: float) -> dict[str, Outcome]:
    return {
        name: replay(service, make(), places=places, requests=requests, rate_per_s=rate_per_s)
        for name, make in ORDERS.items()
    }


def _shown(outcomes: dict[str, Outcome], what: str) -> str:
    return ", ".join(f"{name} {getattr(outcome, what):6.2%}" for name, outcome in outcomes.items())


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure both services."""
    for service in CONTROLNETS.values():
        _measure(service, options.requests, sheet)


if __name__ == "__main__":
    sys.exit(BENCH.command())
