"""Shapes of production: adapters of requests, sizes of masks, and popularity of templates.

Source of the adapters: Katz (ATC'25), services A and B, 20 days, 549,433 requests; cumulative shares read off the
published figures. Between two points of a curve all are equally popular, and so are those beyond its last one, where
the figures end.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

_SECONDS = 20 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCalls:
    """ControlNets or LoRAs of one service of the trace."""

    name: str
    requests: int
    """Requests of the service."""
    per_request: Mapping[int, float]
    """Share of them that use so many."""
    unique: int
    """Adapters in all."""
    curve: tuple[tuple[int, float], ...]
    """Points of rank, and the percentage of all calls that so many most popular ones take."""

    @property
    def rate_per_s(self) -> float:
        """The mean rate of requests."""
        return self.requests / _SECONDS

    def top_share(self, count: int) -> float:
        """Return the share of the calls, in 0 to 1, that the `count` most popular ones take."""
        points = ((0, 0.0), *self.curve, (self.unique, 100.0))
        if not 0 <= count <= self.unique:
            raise ValueError(f"there are {self.unique} of them; asked for {count}")
        after = max(bisect_left(points, count, key=lambda point: point[0]), 1)
        (low_rank, low), (high_rank, high) = points[after - 1 : after + 1]
        return (low + (high - low) * (count - low_rank) / (high_rank - low_rank)) / 100

    def shares(self, count: int | None = None) -> list[float]:
        """Return the shares of the `count` most popular ones, by default of all; they sum to 1."""
        tops = [self.top_share(rank) for rank in range((self.unique if count is None else count) + 1)]
        return [(after - before) / tops[-1] for before, after in pairwise(tops)]

    def calls(self, chance: random.Random, *, count: int | None = None) -> Iterator[tuple[int, ...]]:
        """Yield requests without end, each as the ranks, from 0, of its adapters, at least one.

        Every call is drawn by itself, so that one may be there twice. `count` is as in shares().
        """
        cumulative = list(accumulate(self.shares(count)))
        for wanted in self._wanted(chance, least=1):
            yield tuple(chance.choices(range(len(cumulative)), cum_weights=cumulative, k=wanted))

    def draw(self, chance: random.Random, *, count: int | None = None, least: int = 1) -> Iterator[tuple[int, ...]]:
        """Yield requests without end, each as the ranks, from 0, of its adapters, all of them different.

        So the most popular ones take a little less than their share.

        Args:
            chance: The source of randomness.
            count: As in shares(); no request has more.
            least: 0 also yields the requests that use none.
        """
        cumulative = list(accumulate(self.shares(count)))
        for wanted in self._wanted(chance, least=least):
            drawn: dict[int, None] = {}
            while len(drawn) < min(wanted, len(cumulative)):
                drawn |= dict.fromkeys(chance.choices(range(len(cumulative)), cum_weights=cumulative))
            yield tuple(drawn)

    def _wanted(self, chance: random.Random, *, least: int) -> Iterator[int]:
        """Yield the number that each request uses."""
        counts = [count for count in self.per_request if count >= least]
        weights = [self.per_request[count] for count in counts]
        while True:
            yield from chance.choices(counts, weights)


_REQUESTS_A, _REQUESTS_B = 164_194, 385_239
CONTROLNETS_A = AdapterCalls(
    name="A",
    requests=_REQUESTS_A,
    per_request={1: 0.305, 2: 0.695},
    unique=47,
    curve=(
        *((1, 31.0861), (2, 56.4168), (3, 73.5205), (4, 89.3251), (5, 97.5521), (6, 98.674)),
        *((7, 98.9156), (8, 99.0306), (9, 99.1396), (10, 99.2323), (11, 99.3014), (12, 99.365)),
        *((13, 99.4269), (14, 99.483), (15, 99.539), (16, 99.5847)),
    ),
)
CONTROLNETS_B = AdapterCalls(
    name="B",
    requests=_REQUESTS_B,
    per_request={0: 0.019, 1: 0.251, 2: 0.699, 3: 0.031},
    unique=94,
    curve=(
        *((1, 22.22), (2, 35.7007), (3, 49.1815), (4, 60.8347), (5, 71.5183), (6, 80.5654)),
        *((7, 87.831), (8, 94.4771), (9, 96.1892), (10, 97.4675), (11, 98.7457), (12, 99.4228)),
        *((13, 99.6678), (14, 99.7408), (15, 99.8138), (16, 99.8856)),
    ),
)
LORAS_A = AdapterCalls(
    name="A",
    requests=_REQUESTS_A,
    per_request={0: 0.002, 1: 0.088, 2: 0.910},
    unique=6980,
    curve=(
        *((3, 9.2619), (9, 19.2473), (16, 25.9831), (24, 30.1013), (34, 33.5691), (46, 36.6775)),
        *((60, 39.5164), (76, 42.22), (94, 44.6568), (115, 47.0444), (130, 48.5076), (146, 49.8163)),
        *((169, 51.4563), (203, 53.6358), (239, 55.6701), (273, 57.4062), (306, 58.8953), (338, 60.1788)),
        *((381, 61.716), (425, 63.1514), (469, 64.4483), (520, 65.773), (586, 67.3205), (643, 68.521)),
        *((726, 70.1444), (799, 71.4254), (883, 72.7494), (989, 74.2369), (1105, 75.7231), (1184, 76.6637)),
        *((1329, 78.2613), (1529, 80.2368), (1679, 81.5574), (1834, 82.7764), (2007, 84.0347), (2243, 85.5493)),
        *((2640, 88.0163), (2828, 89.0298), (3343, 91.5933), (3529, 92.3578), (3993, 94.0687), (4501, 95.6892)),
    ),
)
LORAS_B = AdapterCalls(
    name="B",
    requests=_REQUESTS_B,
    per_request={0: 0.072, 1: 0.736, 2: 0.192},
    unique=7463,
    curve=(
        *((2, 26.6315), (6, 40.4403), (13, 52.4754), (17, 56.0996), (24, 60.0629), (33, 63.3954)),
        *((40, 65.2039), (49, 66.8102), (61, 68.5088), (76, 70.1599), (87, 71.0881), (104, 72.2824)),
        *((128, 73.6763), (152, 74.877), (172, 75.7118), (209, 77.069), (244, 78.1965), (283, 79.2975)),
        *((325, 80.2749), (382, 81.4188), (432, 82.2648), (486, 83.0358), (555, 83.8787), (643, 84.8109)),
        *((767, 85.9511), (879, 86.8449), (1050, 88.0465), (1219, 89.0766), (1420, 90.128), (1735, 91.5219)),
        *((1912, 92.1939), (2141, 92.9767), (2370, 93.6536), (2691, 94.4801), (3356, 95.9554), (4091, 97.2521)),
        *((4501, 97.8225),),
    ),
)
CONTROLNETS = {"A": CONTROLNETS_A, "B": CONTROLNETS_B}
LORAS = {"A": LORAS_A, "B": LORAS_B}
"""Both by service."""


# InstGenIE gives the averages of three data sets, .11, .19 and .35, and no more. The shapes here are Beta
# distributions, the usual ones of shares, with these averages: masks of the two traces are of any size and mostly small
# (the density falls, or rises and falls early), those of try-on all cover an upper body and are much alike.
@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRatios:
    """Shares of a picture's tokens that edits of one data set redraw.

    The standard deviation is sqrt(mean * (1 - mean) / (concentration + 1)).
    """

    name: str
    mean: float
    """Mean of the shares, in 0 to 1."""
    concentration: float
    """Sum of both of the Beta distribution's parameters."""

    def draw(self, chance: random.Random) -> Iterator[float]:
        """Yield shares without end, each by itself."""
        first = self.mean * self.concentration
        while True:
            yield chance.betavariate(first, self.concentration - first)


# Beta(1, 8.1): standard deviation .10, median .08, one in ten above .25.
PRODUCTION = MaskRatios(name="production", mean=0.11, concentration=9.1)
# Beta(1.4, 6): standard deviation .13, median .16, one in ten above .38.
PUBLIC = MaskRatios(name="public", mean=0.19, concentration=7.4)
# Beta(9, 16.7): standard deviation .09, nine in ten between .21 and .51.
TRY_ON = MaskRatios(name="try-on", mean=0.35, concentration=25.7)
TRACES = (PRODUCTION, PUBLIC, TRY_ON)

# InstGenIE has 970 templates in 34 million edits, 35,000 for each on average, and no word on how they are shared out.
# Zipf's law, count in inverse proportion to rank, is what popularity of pictures and pages usually follows; here it
# gives the first template 13 % of all edits, the first ten 39 %, and the last one still 4,700. It cannot be much
# steeper: with an exponent above 2.4 the last one would not have been edited once.
TEMPLATES = 970
EDITS = 34_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplatePopularity:
    """The popularity of templates."""

    count: int = TEMPLATES
    """Templates."""
    exponent: float = 1.0
    """Of the rank."""

    def shares(self) -> list[float]:
        """Return the shares of all edits, by rank from the most popular one on; they sum to 1."""
        weights = [rank**-self.exponent for rank in range(1, self.count + 1)]
        total = sum(weights)
        return [weight / total for weight in weights]

    def draw(self, chance: random.Random) -> Iterator[int]:
        """Yield ranks, from 0, without end, each by itself."""
        ranks, shares = range(self.count), self.shares()
        while True:
            yield from chance.choices(ranks, shares, k=1000)
