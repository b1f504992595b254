"""Limits on the calls of a kind that a service serves at once, in all and of one caller.

The more places are taken, the fewer one host may have, so that some are always left for another host.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bottega.errors import QueueFull
from bottega.fair_order import fair_room
from bottega.rpc.peers import Peer

# Most calls end sooner. The time is random so that callers that were refused together do not retry together.
_RETRY_S = (0.5, 1.5)


@dataclass(slots=True)
class CallCounter:
    """A counter of calls."""

    active: int = 0
    """Calls that are being served."""
    opened: int = 0
    """Those, and calls that have ended but whose answers are not read yet."""

    @property
    def count(self) -> int:
        """The number of calls. One that has ended counts half: gRPC only keeps some memory for it."""
        return max(self.active, self.opened // 2)


class CallLimit:
    """A limit on calls of one kind.

    Args:
        most: Calls of all callers.
        share: Share of a host, and of a connection within its host; see `fair_room`.
        limit: Field of ServerConfig with the limit, for errors.
    """

    def __init__(self, *, most: int, share: float, limit: str) -> None:
        self._most = most
        self._share = share
        self._limit = limit
        self._all = CallCounter()
        self._held: dict[Peer | str, CallCounter] = {}  # by connections and hosts that have any

    def acquire(self, peer: Peer) -> CallSlot:
        """Return a slot for one call. Raises QueueFull, with the time after which to retry, if there is none."""
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
        """Yield the connections that have calls, as in Peer.connection."""
        return (key.connection for key in self._held if isinstance(key, Peer))

    def _tidy(self, peer: Peer) -> Callable[[], None]:
        def forget() -> None:
            for key in (peer.host, peer):
                if not self._held[key].opened:
                    del self._held[key]

        return forget


class CallSlot:
    """The slot of one call.

    Args:
        counters: Counters that count the call.
        when_closed: Called when its last resources are freed.
    """

    def __init__(self, counters: Sequence[CallCounter], when_closed: Callable[[], None]) -> None:
        self._counters = counters
        self._when_closed = when_closed
        for counter in counters:
            counter.active += 1
            counter.opened += 1

    def end_serving(self) -> None:
        """Record that the call has ended, although its caller may not have read all answers."""
        for counter in self._counters:
            counter.active -= 1

    def release(self) -> None:
        """Record that the caller has read everything, or is gone."""
        for counter in self._counters:
            counter.opened -= 1
        self._when_closed()


_NONE = CallCounter()


def full(message: str, *, limit: str) -> QueueFull:
    """Return the error for a call without room.

    Args:
        limit: Field of ServerConfig with the limit.
    """
    return QueueFull(f"{message}; ask again", metadata={"limit": limit}, retry_after_s=random.uniform(*_RETRY_S))
