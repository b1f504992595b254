"""Unused offers: how many a caller may have, how many there may be in total, and for how long.

A caller with many unused offers does not block others: its own oldest offer makes room for its next one. All calls are
made under the listener's lock.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from bottega.errors import LinksFull
from bottega.transport.backends import Proven
from bottega.transport.handshake.messages import Direction, HandshakeRequest
from bottega.transport.handshake.offer import Offer

MAX_OFFERS = 256
# For one caller: all workers of one host may reconnect at once, with room left for another host.
MAX_OFFERS_OF_ONE = 128
# An offer is not dropped for others before this. A worker uses it within milliseconds, or within this on a busy
# machine.
SAFE_S = 1.0
# Offers become old enough to be dropped within SAFE_S. The spread keeps refused callers from returning together.
_RETRY_S = (0.3, 1.0)


@dataclass(slots=True, kw_only=True, eq=False)
class PendingOffer:
    """An offer that has not been used yet."""

    offer: Offer
    caller: str
    made: float
    until: float
    changed: threading.Condition
    """Notified when this offer changes. Each offer has its own, so that a crowd of offers wakes no other thread."""
    connections: dict[Direction, Proven] = field(default_factory=dict)
    """Proven connections by direction."""
    request: HandshakeRequest | None = None


class PendingOffers:
    """Unused offers by link_id, the oldest first.

    Args:
        lock: The listener's lock.
        token_s: How long an offer can be used.
    """

    def __init__(self, lock: threading.RLock, *, token_s: float) -> None:
        self.token_s = token_s
        self._lock = lock
        self._pending: dict[str, PendingOffer] = {}

    def get(self, link_id: str) -> PendingOffer | None:
        """Return an offer that can still be used, or None."""
        self._expire()
        return self._pending.get(link_id)

    def add(self, offer: Offer, caller: str) -> None:
        """Add an offer. Call `make_room` first."""
        now = time.monotonic()
        self._pending[offer.link_id] = PendingOffer(
            offer=offer,
            caller=caller,
            made=now,
            until=now + self.token_s,
            changed=threading.Condition(self._lock),
        )

    def make_room(self, caller: str) -> None:
        """Make room for one more offer of this caller.

        At the caller's bound, its oldest offer is dropped. At the total bound, the oldest offer of the caller with the
        most is dropped. Raises LinksFull if that one is too young.
        """
        self._expire()
        counts = Counter(each.caller for each in self._pending.values())
        if counts[caller] >= MAX_OFFERS_OF_ONE:
            self._give_up_oldest(caller)
        elif len(self._pending) >= MAX_OFFERS:
            self._give_up_oldest(_most_of(counts))

    def pop(self, link_id: str) -> PendingOffer:
        """Remove an offer that is being used. Raises KeyError."""
        return self._pending.pop(link_id)

    def drop(self, link_id: str) -> None:
        """Drop an offer if there is one, close its connections, and wake the threads that wait for it."""
        pending = self._pending.pop(link_id, None)
        if pending is None:
            return
        for proven in pending.connections.values():
            proven.connection.close()
        pending.changed.notify_all()

    def clear(self) -> None:
        """Drop all offers."""
        for link_id in list(self._pending):
            self.drop(link_id)

    def _expire(self) -> None:
        now = time.monotonic()
        while (oldest := next(iter(self._pending.values()), None)) is not None and oldest.until <= now:
            self.drop(oldest.offer.link_id)

    def _give_up_oldest(self, caller: str) -> None:
        oldest = next(each for each in self._pending.values() if each.caller == caller)
        if time.monotonic() - oldest.made < SAFE_S:
            raise LinksFull(
                "too many offers of links wait to be used; request one again later, or from another service",
                metadata={"limit": "offers"},
                retry_after_s=random.uniform(*_RETRY_S),
            )
        self.drop(oldest.offer.link_id)


def _most_of(counts: Mapping[str, int]) -> str:
    return max(counts, key=lambda caller: counts[caller])
