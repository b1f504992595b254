"""Limits on how often services may join and on members per host, so that unknown services cannot crowd out others.

A running instance of a service that was a member recently is known. It may join as often as it likes, even if the fleet
is full. It may also exceed the limit of its host while a part of the fleet is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bottega.clocks import Clock
from bottega.errors import FleetFull, QueueFull

MAX_NAMELESS = 48
"""Upper bound on join streams that have not sent their registration yet."""

# Seconds of joins at the allowed rate that may come in one burst, as when services start together.
_BURST_S = 8.0
# Upper bound on the keys of token buckets. The keys that joined longest ago are removed first.
_MAX_COUNTED = 4096
# Largest share of max_members that services of one host may have, including known instances.
_PART_OF_ONE_HOST = 0.75
# Seconds for which an instance that was a member is known, unless the record is full.
_KNOWN_S = 3600.0
# Seconds after which to retry if a member has to leave first, which may happen at any time.
_FULL_RETRY_S = 5.0

MemberKey = tuple[str, str]
"""Kind and name of a member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinBounds:
    """The limits on joins that FleetConfig and GatewayConfig set."""

    max_members: int
    max_members_per_peer: int
    joins_per_s: float
    joins_per_s_by_name: float


class JoinLimits:
    """The limits on joins. For each service that is not `known`, call `check_rate` and then `check_room`."""

    def __init__(self, bounds: JoinBounds, clock: Clock) -> None:
        self._bounds = bounds
        by_name_s = bounds.joins_per_s_by_name
        self._hosts = _TokenBuckets(bounds.joins_per_s, bounds.max_members_per_peer, clock)
        self._names = _TokenBuckets(by_name_s, by_name_s * _BURST_S, clock)
        self._connections = _TokenBuckets(by_name_s, by_name_s * _BURST_S, clock)
        self._known = _PastInstances(bounds.max_members, clock)

    def check_rate(self, *, peer: str, host: str, name: str) -> None:
        """Raise QueueFull, with the time to retry, if services that are no members join too often.

        Joins over one connection do not count against other connections of its host. Joins from one host do not count
        against the same name at another host.

        Args:
            peer: Address of the service's connection.
            host: Host of the service.
            name: Name of the service.
        """
        buckets = (
            (self._connections, peer, "over one connection"),
            (self._names, f"{host} {name}", f"by the name {name}"),
            (self._hosts, host, f"from {host}"),
        )
        for rates, key, what in buckets:
            wait_s = rates.wait_s(key)
            if wait_s:
                limit = "joins_per_s" if rates is self._hosts else "joins_per_s_by_name"
                raise QueueFull(
                    f"services join the fleet too often {what}; retry in {wait_s:.1f} s",
                    metadata={"limit": f"fleet.{limit}"},
                    retry_after_s=wait_s,
                )
        for rates, key, _ in buckets:  # only now: a refused join does not count
            rates.consume(key)

    def check_room(self, host: str, hosts: Iterable[str], *, known: bool) -> None:
        """Raise FleetFull, with the time to retry, if the fleet or the host has as many members as are allowed.

        Args:
            host: Host of the service that joins.
            hosts: The host of each present member.
            known: Whether the service was a member recently.
        """
        members, most = Counter(hosts), self._bounds.max_members
        if not known and members.total() >= most:
            raise _full("max_members", most, "the fleet")
        # Known instances may exceed the limit of their host, but not fill the fleet.
        over = members[host] >= self._bounds.max_members_per_peer
        if over and not (known and members.total() < _PART_OF_ONE_HOST * most):
            raise _full("fleet.max_members_per_peer", self._bounds.max_members_per_peer, f"the fleet's part on {host}")

    def known(self, key: MemberKey, instance: str) -> bool:
        """Return whether this instance of a service was a member recently."""
        return self._known.has(key, instance)

    def remember(self, key: MemberKey, instance: str, *, stayed_s: float) -> None:
        """Remember an instance that is no longer a member. It was one for `stayed_s` seconds."""
        self._known.add(key, instance, stayed_s)


class PendingJoins:
    """Bounds the number of join streams that have not sent their registration yet."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], str] = {}

    @contextlib.contextmanager
    def slot(self, host: str) -> Iterator[asyncio.Future[None]]:
        """Count a join stream while the block runs. The future is done when it must end in favour of a newer one.

        The oldest stream of the host with the most streams ends first.
        """
        if len(self._waiting) >= MAX_NAMELESS:
            self._evict_one()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = host
        try:
            yield place
        finally:
            self._waiting.pop(place, None)

    def _evict_one(self) -> None:
        host = Counter(self._waiting.values()).most_common(1)[0][0]
        oldest = next(place for place, whose in self._waiting.items() if whose == host)
        del self._waiting[oldest]
        if not oldest.done():
            oldest.set_result(None)


class _TokenBuckets:
    """Token buckets by key. Each bucket gets `rate` tokens a second and holds up to `burst`."""

    def __init__(self, rate: float, burst: float, clock: Clock) -> None:
        self._rate = rate
        self._burst = max(1.0, burst)
        self._clock = clock
        # by key: tokens, and the time at which they were counted
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, key: str) -> float:
        left = self._now(key)
        return 0.0 if left >= 1 else (1 - left) / self._rate

    def consume(self, key: str) -> None:
        left = self._now(key) - 1
        self._left.pop(key, None)  # so that it is the newest
        self._left[key] = (left, self._clock.monotonic())
        if len(self._left) > _MAX_COUNTED:
            self._left.popitem(last=False)

    def _now(self, key: str) -> float:
        now = self._clock.monotonic()
        left, at = self._left.get(key, (self._burst, now))
        return min(self._burst, left + (now - at) * self._rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PastInstance:
    instance: str
    stayed_s: float
    at: float


class _PastInstances:
    """A bounded record of instances that were members recently.

    If it is full, the instance that was a member for the shortest time is removed first.
    """

    def __init__(self, most: int, clock: Clock) -> None:
        self._most = most
        self._clock = clock
        self._past: dict[MemberKey, _PastInstance] = {}

    def has(self, key: MemberKey, instance: str) -> bool:
        past = self._past.get(key)
        if past is None or past.at < self._clock.monotonic() - _KNOWN_S:
            return False
        return hmac.compare_digest(past.instance.encode(), instance.encode())

    def add(self, key: MemberKey, instance: str, stayed_s: float) -> None:
        now = self._clock.monotonic()
        older = self._past.get(key)
        if older is not None and older.instance != instance and older.stayed_s > stayed_s and older.at > now - _KNOWN_S:
            return  # an instance that had the name for a moment does not replace one that stayed longer
        self._past[key] = _PastInstance(instance=instance, stayed_s=stayed_s, at=now)
        if len(self._past) > self._most:
            self._past = {key: past for key, past in self._past.items() if past.at > now - _KNOWN_S}
        while len(self._past) > self._most:
            del self._past[min(self._past, key=lambda key: self._past[key].stayed_s)]


def _full(key: str, most: int, whose: str) -> FleetFull:
    return FleetFull(
        f"{whose} has {most} members; {key} of the gateway's configuration allows no more",
        metadata={key: str(most)},
        retry_after_s=_FULL_RETRY_S,
    )
