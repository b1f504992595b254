"""Offers that were made and not used yet: how many there may be of a caller and in all, and for how long.

A caller with many unused offers does not get in the way of others: its own oldest one makes room for its next. All
calls come under the listener's lock.
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
# Of one caller: all workers of one host may come back to a server at once, and another host's find room beside them.
MAX_OFFERS_OF_ONE = 128
# An offer is not given up for others before this: a worker uses it within milliseconds, on a busy machine within this.
SAFE_S = 1.0
# Offers become old enough to make room within SAFE_S; callers that were refused together should not come back together.
_RETRY_S = (0.3, 1.0)


@dataclass(slots=True, kw_only=True, eq=False)
class PendingOffer:
    """changed: notified when this offer changes; one for each offer, so that a crowd of offers wakes nobody in vain."""

    offer: Offer
    caller: str
    made: float
    until: float
    changed: threading.Condition
    # Proven connections by direction.
    connections: dict[Direction, Proven] = field(default_factory=dict)
    request: HandshakeRequest | None = None


class PendingOffers:
    """By link_id, the oldest first. lock: the listener's. token_s: for how long one can be used."""

    def __init__(self, lock: threading.RLock, *, token_s: float) -> None:
        self.token_s = token_s
        self._lock = lock
        self._pending: dict[str, PendingOffer] = {}

    def get(self, link_id: str) -> PendingOffer | None:
        """One that can still be used."""
        self._expire()
        return self._pending.get(link_id)

    def add(self, offer: Offer, caller: str) -> None:
        """Adds one. Call `make_room` first."""
        now = time.monotonic()
        self._pending[offer.link_id] = PendingOffer(
            offer=offer,
            caller=caller,
            made=now,
            until=now + self.token_s,
            changed=threading.Condition(self._lock),
        )

    def make_room(self, caller: str) -> None:
        """Makes room for one more of this caller. At the bound of a caller its oldest one is given up; at the bound of
        all, the oldest one of the caller that has most. Raises LinksFull where that one is too young."""
        self._expire()
        counts = Counter(each.caller for each in self._pending.values())
        if counts[caller] >= MAX_OFFERS_OF_ONE:
            self._give_up_oldest(caller)
        elif len(self._pending) >= MAX_OFFERS:
            self._give_up_oldest(_most_of(counts))

    def pop(self, link_id: str) -> PendingOffer:
        """Removes one that is being used. Raises KeyError."""
        return self._pending.pop(link_id)

    def drop(self, link_id: str) -> None:
        """Gives up an offer, closes its connections, and wakes threads that wait for it. Harmless if there is none."""
        pending = self._pending.pop(link_id, None)
        if pending is None:
            return
        for proven in pending.connections.values():
            proven.connection.close()
        pending.changed.notify_all()

    def clear(self) -> None:
        """Gives all of them up."""
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
