"""How many services of a kind a model needs: the forecast of its work, hysteresis, and the shares of hosts.

A service that is started now helps only after its start time. So the work is forecast over that time and as long again:
what waits, what runs, and what arrives at the measured rate. If the present services cannot do it, as many are added as
catch up after their start. Services are removed only when fewer would have been enough for a while, with room to spare,
so that chance arrivals start and stop none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

# Shares of the services' time that arriving work may take: more of them are started above the first one, and some are
# stopped only if the others would stay below the second one. Poisson arrivals queue for long near 1.
_BUSY, _IDLE = 0.8, 0.6
# Time over which arrivals are averaged. With 60 s a tenfold burst of a minute was over before the average had followed;
# a tenth more of its jobs were late (make bench-scaling).
_RATE_S = 20.0
# An average below this is none: it decays forever, and a last job would keep a service for an hour.
_LEAST_RATE = 0.01
# Differences that are due to rounding.
_EPSILON = 1e-6


class ArrivalRate:
    """The rate at which something arrives per second, averaged over the last 20 s with decreasing weights."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = 0.0

    def note(self, amount: float, now: float) -> None:
        """Add an amount that arrived at the time `now` of a monotonic clock."""
        self._rate = self._decayed(now) + amount / _RATE_S
        self._at = max(now, self._at)

    def per_s(self, now: float) -> float:
        """Return the amount per second."""
        rate = self._decayed(now)
        return rate if rate >= _LEAST_RATE else 0.0

    def _decayed(self, now: float) -> float:
        return self._rate * math.exp(-max(0.0, now - self._at) / _RATE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work for one model, in seconds of a device that runs batches of the best size."""

    waiting: int = 0
    """Number of jobs that wait."""
    waiting_s: float = 0.0
    """Seconds of the jobs that wait."""
    running_s: tuple[float, ...] = ()
    """Seconds that each busy service still needs for its jobs."""
    arriving: float = 0.0
    """Jobs that arrive per second."""
    arriving_s: float = 0.0
    """Seconds of work that arrive per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """The services of one kind for one model."""

    ready: int = 0
    starting_s: tuple[float, ...] = ()
    """Seconds that each service which was started still needs until it is ready."""
    start_s: float = 0.0
    """Seconds that a new service needs until it is ready."""

    @property
    def count(self) -> int:
        """Number of services that are ready or start."""
        return self.ready + len(self.starting_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The number of services that the work needs."""

    most: int
    """Above this number, services may be stopped."""
    least: int
    """Below this number, services are started."""


def services_needed(work: Work, supply: Supply, *, wait_s: float) -> Need:
    """Return how many services the work needs.

    Args:
        wait_s: Seconds within which waiting work should be done.
    """
    return Need(
        most=_needed(work, supply, wait_s=wait_s, share=_IDLE),
        least=_needed(work, supply, wait_s=wait_s, share=_BUSY),
    )


def _needed(work: Work, supply: Supply, *, wait_s: float, share: float) -> int:
    # New services catch up for as long as they take to start, so that slow starters are not started by the dozen.
    catch_up_s = max(wait_s, supply.start_s)
    horizon_s = supply.start_s + catch_up_s
    running_s = sum(min(seconds, horizon_s) for seconds in work.running_s)  # a service cannot give its jobs away
    arriving_s = _lasting_s(work) / share
    # Where work keeps arriving, as much still runs at the end as runs now.
    needed_s = work.waiting_s + max(running_s, arriving_s * horizon_s)
    present_s = supply.ready * horizon_s + sum(max(0.0, horizon_s - left_s) for left_s in supply.starting_s)
    if needed_s <= present_s:
        return math.ceil(needed_s / horizon_s - _EPSILON)
    missing = math.ceil((needed_s - present_s) / catch_up_s - _EPSILON)
    # A job runs on one service at a time.
    jobs = len(work.running_s) + work.waiting + math.ceil(work.arriving * horizon_s)
    return max(min(supply.count + missing, jobs), math.ceil(arriving_s))


def _lasting_s(work: Work) -> float:
    """Return the seconds of work that keep arriving each second. One job alone does not mean that others follow."""
    jobs = work.arriving * _RATE_S
    return work.arriving_s * (1.0 - 1.0 / jobs) if jobs > 1.0 else 0.0


class TargetCount:
    """The number of services to keep: it rises at once, and falls to the most that was needed in the last `hold_s`.

    Args:
        count: Number of services at the beginning.
        now: Time on a monotonic clock.
    """

    def __init__(self, count: int, now: float) -> None:
        self.count = count
        # Times and needs, each larger than all that came after it.
        self._needs: deque[tuple[float, int]] = deque([(now, count)])

    def update(self, need: Need, now: float, *, hold_s: float) -> int:
        """Return the number of services to keep from now on.

        Args:
            hold_s: Seconds for which fewer services must have been enough before some are stopped.
        """
        needed = self._needs
        while needed and needed[-1][1] <= need.most:
            needed.pop()
        needed.append((now, need.most))
        while needed[0][0] < now - hold_s:
            needed.popleft()
        self.count = max(min(self.count, needed[0][1]), need.least)
        return self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """The services of a kind and model that one host may run."""

    minimum: int
    maximum: int
    """Upper bound on services, minus those whose start has failed."""
    count: int
    """Number of services that run or start."""


def share_out(count: int, pools: Sequence[PoolState]) -> list[int]:
    """Divide a number of services among the pools of several hosts, and return the number of each.

    Every pool keeps its minimum. Services that run stay where they are, as far as they are needed; new ones go to the
    hosts with the fewest, so that the loss of a host costs little.
    """
    shares = [min(pool.minimum, pool.maximum) for pool in pools]
    for bounds in ([min(pool.count, pool.maximum) for pool in pools], [pool.maximum for pool in pools]):
        while sum(shares) < count:
            open_pools = [place for place, share in enumerate(shares) if share < bounds[place]]
            if not open_pools:
                break
            shares[min(open_pools, key=shares.__getitem__)] += 1
    return shares
