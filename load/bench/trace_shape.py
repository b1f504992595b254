"""The shape of a production trace of diffusion requests: how popular its ControlNets were. It knows no bench.

Source: Katz (ATC'25), services A and B, 20 days, 549,433 requests; cumulative shares read off the published
figures. Beyond rank 16, where the figures end, the rest is spread evenly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

_SECONDS = 20 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service of the trace.

    requests: in all. per_request: share of the requests that use so many ControlNets. unique: ControlNets in all.
    cumulative: share of all calls that the so many most popular ones take, in percent, from the first on.
    """

    name: str
    requests: int
    per_request: Mapping[int, float]
    unique: int
    cumulative: tuple[float, ...]

    @property
    def rate_per_s(self) -> float:
        """Requests a second, on average."""
        return self.requests / _SECONDS

    def top_share(self, count: int) -> float:
        """Share of the calls, in 0 to 1, that the `count` most popular ControlNets take."""
        return self.cumulative[count - 1] / 100

    def shares(self) -> list[float]:
        """Share of the calls by rank, the most popular first; they sum to 1."""
        known = [(after - before) / 100 for before, after in pairwise((0.0, *self.cumulative))]
        rest = self.unique - len(known)
        return [*known, *[(1 - sum(known)) / rest] * rest]

    def draw(self, chance: random.Random) -> Iterator[tuple[str, ...]]:
        """Requests for ever, each as the names of its ControlNets, at least one; every call is drawn by itself."""
        names, shares = [f"{self.name}{rank}" for rank in range(1, self.unique + 1)], self.shares()
        counts = [count for count in self.per_request if count]
        weights = [self.per_request[count] for count in counts]
        while True:
            (count,) = chance.choices(counts, weights)
            yield tuple(chance.choices(names, shares, k=count))


A = Service(
    name="A",
    requests=164_194,
    per_request={1: 0.305, 2: 0.695},
    unique=47,
    cumulative=(
        *(31.0861, 56.4168, 73.5205, 89.3251, 97.5521, 98.674, 98.9156, 99.0306),
        *(99.1396, 99.2323, 99.3014, 99.365, 99.4269, 99.483, 99.539, 99.5847),
    ),
)
B = Service(
    name="B",
    requests=385_239,
    per_request={0: 0.019, 1: 0.251, 2: 0.699, 3: 0.031},
    unique=94,
    cumulative=(
        *(22.22, 35.7007, 49.1815, 60.8347, 71.5183, 80.5654, 87.831, 94.4771),
        *(96.1892, 97.4675, 98.7457, 99.4228, 99.6678, 99.7408, 99.8138, 99.8856),
    ),
)
