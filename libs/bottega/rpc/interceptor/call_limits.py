"""Limits of calls: how many of a kind a service has in its hands at once, and how many of them one caller may have.

A host with many calls does not take the room of hosts with few: the more places are taken, the fewer one host may have,
so that there are always some for another host.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bottega.errors import QueueFull
from bottega.fair_order import fair_room
from bottega.rpc.peers import Peer

# Most requests are dealt with in less; and callers that were refused together should not come back together.
_RETRY_S = (0.5, 1.5)


@dataclass(slots=True)
class CallCounter:
    """Calls. active: being served. opened: those, and those whose answers were not read out."""

    active: int = 0
    opened: int = 0

    @property
    def count(self) -> int:
        """How many it may be said to be: of one that has ended gRPC has only some memory left, so it counts half."""
        return max(self.active, self.opened // 2)


class CallLimit:
    """Those of one kind of call. most: of all callers. share: see `fair_room`, of a host, and of a host's connection.

    limit: of ServerConfig, which says how many there are.
    """

    def __init__(self, *, most: int, share: float, limit: str) -> None:
        self._most = most
        self._share = share
        self._limit = limit
        self._all = CallCounter()
        self._held: dict[Peer | str, CallCounter] = {}  # by connections and hosts that have any

    def acquire(self, peer: Peer) -> CallSlot:
        """A place for one call. Raises QueueFull, with the time after which to ask again, when there is none."""
        host, connection = self._held.get(peer.host, _NONE), self._held.get(peer, _NONE)
        free = self._most - self._all.count
        if free <= 0:
            raise full("as many calls are served as can be", limit=self._limit)
        host_room = fair_room(free=free, held=host.count, share=self._share)
        if host_room <= 0:
            raise full("your host has as many calls open as it may have now", limit=self._limit)
        if fair_room(free=host_room, held=connection.count, share=self._share) <= 0:
            raise full("your connection has as many calls open as it may have now", limit=self._limit)
        return CallSlot(
            [self._all, *(self._held.setdefault(key, CallCounter()) for key in (peer.host, peer))], self._tidy(peer)
        )

    def connections(self) -> Iterator[str]:
        """Those that have any, as Peer.connection."""
        return (key.connection for key in self._held if isinstance(key, Peer))

    def _tidy(self, peer: Peer) -> Callable[[], None]:
        def forget() -> None:
            for key in (peer.host, peer):
                if not self._held[key].opened:
                    del self._held[key]

        return forget


class CallSlot:
    """The place of one call. counters: those that count it. when_closed: called when its last resources are freed."""

    def __init__(self, counters: Sequence[CallCounter], when_closed: Callable[[], None]) -> None:
        self._counters = counters
        self._when_closed = when_closed
        for counter in counters:
            counter.active += 1
            counter.opened += 1

    def end_serving(self) -> None:
        """The call has ended, but for what its caller has not read."""
        for counter in self._counters:
            counter.active -= 1

    def release(self) -> None:
        """Nothing is left of the call, which has ended."""
        for counter in self._counters:
            counter.opened -= 1
        self._when_closed()


_NONE = CallCounter()


def full(message: str, *, limit: str) -> QueueFull:
    """The error of a call for which there is no room. limit: the field of ServerConfig that bounds it."""
    return QueueFull(f"{message}; ask again", metadata={"limit": limit}, retry_after_s=random.uniform(*_RETRY_S))
