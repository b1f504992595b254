"""How much of its calls' requests a service takes in at once: a bound that holds before anything is parsed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar

from bottega.fair_order import fair_room
from bottega.rpc.interceptor.call_limits import full
from bottega.rpc.interceptor.fair_queue import FairQueue
from bottega.rpc.peers import Peer

ReadT = TypeVar("ReadT")
KeyT = TypeVar("KeyT")

# For a message on a slow line while nobody waits for the room that it takes, and while somebody does.
_COMING_S = 30.0
_CONTENDED_S = 2.0
# Longer than what is in the way may stay there.
_WAIT_S = 3.0


class QuotaShare:
    """What the request of one call takes of the quota, until the block ends or it is released."""

    def __init__(self, quota: MemoryQuota, peer: Peer) -> None:
        self._quota = quota
        self._peer = peer
        self._size_bytes = quota.message_bytes
        self._coming = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def shrink(self, size_bytes: int) -> None:
        """Keep room for a message that is here, and only so large."""
        freed_bytes = max(0, self._size_bytes - size_bytes)
        self._size_bytes -= freed_bytes
        self._quota.release(self._peer, freed_bytes, arrived=self._coming)
        self._coming = False

    def release(self) -> None:
        """Give the room back: nobody holds the message any more. Harmless when done before."""
        self.shrink(0)


class MemoryQuota:
    """A bound on the requests of one kind that are coming in, or that somebody still holds.

    gRPC tells neither how much of a message has arrived nor how much its caller has announced before all of it is here.
    So each message that is coming counts as the largest that gRPC takes, and no caller has more than a share of that:
    one that opens calls and says nothing holds up itself.

    Args:
        max_bytes: Of all requests.
        message_bytes: The most that one of them may take while it is coming.
        share: See `fair_order.fair_room`; of a host (or tenant), and for what is coming of that again of one of its
            connections. Whoever has nothing is let in wherever there is room.
        contended_s: How long a message may take to come while somebody waits for the room that it takes.
    """

    def __init__(
        self, *, max_bytes: int, message_bytes: int, share: float = 1.0, contended_s: float = _CONTENDED_S
    ) -> None:
        assert max_bytes >= message_bytes
        self._free_bytes = max_bytes
        self.message_bytes = message_bytes
        self._share = share
        self._contended_s = contended_s
        self._held = Counter[str]()
        """Bytes by host, of hosts that hold any."""
        self._announced = Counter[Peer | str]()
        """Bytes of messages that are coming, by connection and by host, where any are."""
        self._waiting = FairQueue()
        self._coming: dict[asyncio.Timeout, float] = {}

    async def reserve(self, peer: Peer) -> QuotaShare:
        """Reserve room for one message of a caller; callers that wait for it get it in fair turns.

        Raises QueueFull, with the time after which to ask again, when there is none soon.
        """
        if self._has_room(peer.host) and self._has_room_on(peer) and not self._waiting.has(peer):
            self._take(peer)
        else:
            await self._wait_for_turn(peer)
        return QuotaShare(self, peer)

    async def receive(self, read: Callable[[], Awaitable[ReadT]]) -> ReadT:
        """Return the message that `read` waits for. Raises QueueFull when it takes long while others wait for room."""
        scope = asyncio.timeout(self._contended_s if self._waiting else _COMING_S)
        self._coming[scope] = asyncio.get_running_loop().time()
        try:
            async with scope:
                return await read()
        except TimeoutError:
            if not scope.expired():
                raise
            raise full("the request came too slowly", limit="max_requests_mib") from None
        finally:
            del self._coming[scope]

    def release(self, peer: Peer, size_bytes: int, *, arrived: bool) -> None:
        """Free so much of what a caller holds, and let in who waits for it. arrived: a message is coming no more."""
        self._free_bytes += size_bytes
        _subtract(self._held, peer.host, size_bytes)
        if arrived:
            for key in (peer, peer.host):
                _subtract(self._announced, key, self.message_bytes)
        while self._free_bytes >= self.message_bytes:
            turn = self._waiting.pop(host=self._has_room, connection=self._has_room_on)
            if turn is None:
                break
            self._take(turn.peer)
            turn.come.set_result(None)

    def _take(self, peer: Peer) -> None:
        self._free_bytes -= self.message_bytes
        self._held[peer.host] += self.message_bytes
        for key in (peer, peer.host):
            self._announced[key] += self.message_bytes

    def _has_room(self, host: str) -> bool:
        """Whether a host may take in one more message now."""
        if self._free_bytes < self.message_bytes:
            return False
        if self._held[host] and fair_room(free=self._free_bytes, held=self._held[host], share=self._share) <= 0:
            return False
        return not self._announced[host] or self._host_room(host) >= self.message_bytes

    def _has_room_on(self, peer: Peer) -> bool:
        """Whether a connection of a host that has room may."""
        announced, free = self._announced[peer], self._host_room(peer.host)
        return not announced or fair_room(free=free, held=announced, share=self._share) >= self.message_bytes

    def _host_room(self, host: str) -> float:
        """How much more of a host's messages may be coming."""
        return fair_room(free=self._free_bytes, held=self._announced[host], share=self._share)

    async def _wait_for_turn(self, peer: Peer) -> None:
        turn = self._waiting.add(peer)
        self._shorten_waits()
        try:
            await asyncio.wait([turn.come], timeout=_WAIT_S)
        except asyncio.CancelledError:
            if turn.come.done():
                self.release(peer, self.message_bytes, arrived=True)
            else:
                self._waiting.remove(turn)
            raise
        if not turn.come.done():
            self._waiting.remove(turn)
            raise full("as many requests are taken in as there is memory for", limit="max_requests_mib")

    def _shorten_waits(self) -> None:
        """End calls that send slowly: a caller waits for room."""
        now = asyncio.get_running_loop().time()
        for scope, began in self._coming.items():
            ends = scope.when()
            if ends is not None and not scope.expired() and ends > began + self._contended_s:
                scope.reschedule(max(now, began + self._contended_s))


def _subtract(counts: Counter[KeyT], key: KeyT, size_bytes: int) -> None:
    counts[key] -= size_bytes
    if not counts[key]:
        del counts[key]
