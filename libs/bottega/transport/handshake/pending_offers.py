"""Offers that were made and that nobody has taken up yet: how many there may be, whose, and for how long.

Whoever asks for many and takes up none is in nobody's way: its own oldest ones make room for the next. All calls come
under the listener's lock. It opens no link.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from bottega.errors import LinksFull
from bottega.transport.handshake.messages import Direction, HandshakeRequest
from bottega.transport.handshake.offer import Offer

MAX_OFFERS = 256
# Of one caller: all workers of one host may come back to a server at once, and another host's find room beside them.
MAX_OFFERS_OF_ONE = 128
# For which an offer stays whoever else asks: a worker takes it up in milliseconds, on a busy machine within this.
SAFE_S = 1.0
# Offers become old enough to make room within SAFE_S; those who were refused together shall not come back together.
_RETRY_S = (0.3, 1.0)


@dataclass(slots=True, kw_only=True, eq=False)
class PendingOffer:
    """changed: told of whatever becomes of it, and of nothing else, so that a crowd of offers wakes nobody in vain."""

    offer: Offer
    caller: str
    made: float
    until: float
    changed: threading.Condition
    # Proven connections by direction, with what the connecting end takes in.
    connections: dict[Direction, socket.socket] = field(default_factory=dict)
    request: HandshakeRequest | None = None


class PendingOffers:
    """By link_id, the oldest first. lock: the listener's. token_s: for how long one may be taken up."""

    def __init__(self, lock: threading.RLock, *, token_s: float) -> None:
        self.token_s = token_s
        self._lock = lock
        self._pending: dict[str, PendingOffer] = {}

    def get(self, link_id: str) -> PendingOffer | None:
        """One that can still be taken up."""
        self._expire()
        return self._pending.get(link_id)

    def add(self, offer: Offer, caller: str) -> None:
        """Has one wait. Call `make_room` first."""
        now = time.monotonic()
        self._pending[offer.link_id] = PendingOffer(
            offer=offer,
            caller=caller,
            made=now,
            until=now + self.token_s,
            changed=threading.Condition(self._lock),
        )

    def make_room(self, caller: str) -> None:
        """For one more of this caller: where it has as many as it may, its oldest one is given up; where all together
        have, the oldest one of whoever has most. Raises LinksFull where that one is too young."""
        self._expire()
        counts = Counter(each.caller for each in self._pending.values())
        if counts[caller] >= MAX_OFFERS_OF_ONE:
            self._give_up_oldest(caller)
        elif len(self._pending) >= MAX_OFFERS:
            self._give_up_oldest(_most_of(counts))

    def pop(self, link_id: str) -> PendingOffer:
        """Hands one over that is taken up. Raises KeyError."""
        return self._pending.pop(link_id)

    def drop(self, link_id: str) -> None:
        """Gives up what came of an offer, and wakes whoever waits for it. Harmless where there is none."""
        pending = self._pending.pop(link_id, None)
        if pending is None:
            return
        for connection in pending.connections.values():
            connection.close()
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
                "as many offers of links wait to be taken up as may; ask again, or another service",
                metadata={"limit": "offers"},
                retry_after_s=random.uniform(*_RETRY_S),
            )
        self.drop(oldest.offer.link_id)


def _most_of(counts: Mapping[str, int]) -> str:
    return max(counts, key=lambda caller: counts[caller])
