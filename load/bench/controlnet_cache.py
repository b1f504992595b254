"""How often a ControlNet is there when a request needs it, by budget: the suite's way, LRU and LFU.

A simulation of the state machine that servers and workers run, on the popularity of a production trace: requests come
one after the other, as caches are compared; and, where it is judged, at random at the trace's mean rate, all of a
service on one server, where requests and loads overlap. All orders see the same requests.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from bottega.caching import CacheItem, EvictionOrder, LoadClaim, LoadPlan, Popularity
from load.bench.report import report
from load.replay.arrivals import poisson
from load.replay.trace_shape import CONTROLNETS, AdapterCalls

# Reading 2.5 GB, an SDXL ControlNet in half precision, from a good disk; and the time of a picture with one.
LOAD_S = 2.5
USE_S = 5.0
# So rarely that nothing overlaps.
ONE_BY_ONE_PER_S = 1e-6
# Requests up to this share of them teach the orders and are not counted.
LEARNING = 0.2
# How many of the most popular ControlNets have room where it is judged.
JUDGED = {"A": 5, "B": 8}
# How far below the share of their calls the hits may be.
BOUND = 0.01
BUDGETS = {"A": (3, 4, 5, 6, 8, 12), "B": (3, 5, 8, 10, 12, 16)}


class LeastRecentlyUsed:
    """An EvictionOrder: whoever was used longest ago goes; nobody comes back unasked."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._clock = itertools.count(1)

    def used(self, name: str) -> None:
        """See EvictionOrder."""
        self._last[name] = next(self._clock)

    def value(self, name: str) -> tuple[int, int]:
        """See EvictionOrder."""
        return self._last.get(name, 0), 0

    def worth_replacing(self, absent: str, others: Sequence[str]) -> bool:
        """See EvictionOrder."""
        return False


class LeastFrequentlyUsed:
    """An EvictionOrder: whoever was used least since the beginning goes; nobody comes back unasked."""

    def __init__(self) -> None:
        self._uses: Counter[str] = Counter()

    def used(self, name: str) -> None:
        """See EvictionOrder."""
        self._uses[name] += 1

    def value(self, name: str) -> tuple[int, int]:
        """See EvictionOrder."""
        return self._uses[name], 0

    def worth_replacing(self, absent: str, others: Sequence[str]) -> bool:
        """See EvictionOrder."""
        return False


ORDERS: dict[str, Callable[[], EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "ours": Popularity,
}


@dataclass(slots=True, kw_only=True)
class Replay:
    """A plan with places for so many ControlNets of one size, on a clock of its own."""

    plan: LoadPlan
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _now_s: float = 0.0
    _claims: list[LoadClaim] = field(default_factory=list)

    def request(self, at_s: float, names: Sequence[str]) -> None:
        """A request arrives; requests come in their order."""
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
        """Starts the load that is due, and the pictures whose ControlNets are here."""
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
    """Misses as a share of the calls, and loads for each call."""

    misses: float
    loads: float


def replay(service: AdapterCalls, order: EvictionOrder, *, places: int, requests: int, rate_per_s: float) -> Outcome:
    """Draws requests of a service, the same for every order."""
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


def measure(service: AdapterCalls, requests: int) -> tuple[list[tuple[str, str, str]], dict[str, float]]:
    """The rows of the table, and the values."""
    judged = JUDGED[service.name]
    share = service.top_share(judged)
    prefix = service.name.lower()
    rows: list[tuple[str, str, str]] = []
    values: dict[str, float] = {}
    for places in BUDGETS[service.name]:
        seen = _orders(service, places, requests, ONE_BY_ONE_PER_S)
        wanted = f"ours at most {1 - share + BOUND:.1%}" if places == judged else ""
        rows.append((f"misses, service {service.name}, room for {places}", _said(seen, "misses"), wanted))
        if places == judged:
            rows.append(("  loads for each call there", _said(seen, "loads"), ""))
            values |= {f"{prefix}_{name}_misses": outcome.misses for name, outcome in seen.items()}
            values[f"{prefix}_loss_points"] = 100 * (share - (1 - seen["ours"].misses))
            busy = _orders(service, places, requests, service.rate_per_s)
            rows.append((f"  misses there, all of service {service.name} on one server", _said(busy, "misses"), ""))
            values[f"{prefix}_busy_loss_points"] = 100 * (share - (1 - busy["ours"].misses))
    return rows, values


def _orders(service: AdapterCalls, places: int, requests: int, rate_per_s: float) -> dict[str, Outcome]:
    return {
        name: replay(service, make(), places=places, requests=requests, rate_per_s=rate_per_s)
        for name, make in ORDERS.items()
    }


def _said(outcomes: dict[str, Outcome], what: str) -> str:
    return ", ".join(f"{name} {getattr(outcome, what):6.2%}" for name, outcome in outcomes.items())


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="drawn for each row")
    options = parser.parse_args()
    rows: list[tuple[str, str, str]] = []
    values: dict[str, float] = {}
    for service in CONTROLNETS.values():
        its_rows, its_values = measure(service, options.requests)
        rows += its_rows
        values |= its_values
    report("controlnet_cache", rows, values)


if __name__ == "__main__":
    main()
