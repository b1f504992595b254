"""The shape of a production trace of diffusion requests: how popular its ControlNets and LoRAs were.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraCalls:
    """LoRAs of one service of the trace; most of them were called a few times.

    per_request: share of the requests that use so many. unique: LoRAs in all. points: (rank, share of all calls that so
    many most popular ones take, in percent); between two of them all are equally popular.
    """

    name: str
    per_request: Mapping[int, float]
    unique: int
    points: tuple[tuple[int, float], ...]

    def top_share(self, count: int) -> float:
        """Share of the calls, in 0 to 1, that the `count` most popular LoRAs take."""
        known = ((0, 0.0), *self.points)
        for (before, low), (after, high) in pairwise(known):
            if count <= after:
                return (low + (high - low) * (count - before) / (after - before)) / 100
        raise ValueError(f"the figure ends at rank {self.points[-1][0]}; asked for {count}")

    def shares(self, count: int) -> list[float]:
        """Of the `count` most popular ones, the most popular first; they sum to 1, the others left out."""
        tops = [self.top_share(rank) for rank in range(count + 1)]
        return [(after - before) / tops[-1] for before, after in pairwise(tops)]

    def draw(self, count: int, chance: random.Random) -> Iterator[tuple[int, ...]]:
        """Requests for ever, each as the ranks, from 0, of its LoRAs, at least one, all of them different."""
        ranks, shares = range(count), self.shares(count)
        counts = [each for each in self.per_request if each]
        weights = [self.per_request[each] for each in counts]
        while True:
            (wanted,) = chance.choices(counts, weights)
            drawn: dict[int, None] = {}
            while len(drawn) < wanted:
                drawn |= dict.fromkeys(chance.choices(ranks, shares))
            yield tuple(drawn)


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
LORAS_A = LoraCalls(
    name="A",
    per_request={0: 0.002, 1: 0.088, 2: 0.910},
    unique=6980,
    points=(
        *((3, 9.2619), (9, 19.2473), (16, 25.9831), (24, 30.1013), (34, 33.5691), (46, 36.6775)),
        *((60, 39.5164), (76, 42.22), (94, 44.6568), (115, 47.0444), (130, 48.5076), (146, 49.8163)),
        *((169, 51.4563), (203, 53.6358), (239, 55.6701), (273, 57.4062), (306, 58.8953), (338, 60.1788)),
        *((381, 61.716), (425, 63.1514), (469, 64.4483), (520, 65.773), (586, 67.3205), (643, 68.521)),
    ),
)
LORAS_B = LoraCalls(
    name="B",
    per_request={0: 0.072, 1: 0.736, 2: 0.192},
    unique=7463,
    points=(
        *((2, 26.6315), (6, 40.4403), (13, 52.4754), (17, 56.0996), (24, 60.0629), (33, 63.3954)),
        *((40, 65.2039), (49, 66.8102), (61, 68.5088), (76, 70.1599), (87, 71.0881), (104, 72.2824)),
        *((128, 73.6763), (152, 74.877), (172, 75.7118), (209, 77.069), (244, 78.1965), (283, 79.2975)),
        *((325, 80.2749), (382, 81.4188), (432, 82.2648), (486, 83.0358), (555, 83.8787), (643, 84.8109)),
    ),
)
