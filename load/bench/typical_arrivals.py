"""Random arrivals of a run that is neither a lucky nor an unlucky one, and the queue that judges that."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from load.bench.framework import percentile
from load.replay.arrivals import poisson

# Runs of which typical_arrivals takes the one in the middle.
_CANDIDATES = 101


def one_by_one(at_s: Sequence[float], service_s: Iterator[float]) -> list[float]:
    """Return the seconds from arrival to end where a server takes one request at a time, first come first.

    Args:
        service_s: Seconds that each request takes.
    """
    took_s, free_s = [], 0.0
    for arrived_s in at_s:
        free_s = max(free_s, arrived_s) + next(service_s)
        took_s.append(free_s - arrived_s)
    return took_s


def typical_arrivals(rate_per_s: float, count: int, *, capacity_per_s: float, seed: str = "") -> list[float]:
    """Return random times at which requests come.

    What a queue near its capacity does depends on the run more than on the server: at full load the p95 of a hundred
    requests is 3 service times or 15. So this is, of 101 runs of a Poisson process, the one in which the p95 of a
    server that takes one at a time, for equally long, is the median.
    """

    def run(number: int) -> list[float]:
        return poisson(rate_per_s, count, random.Random(f"{seed} {number}"))

    def p95_s(at_s: Sequence[float]) -> float:
        return percentile(one_by_one(at_s, itertools.repeat(1.0 / capacity_per_s)), 0.95)

    return sorted(map(run, range(_CANDIDATES)), key=p95_s)[_CANDIDATES // 2]
