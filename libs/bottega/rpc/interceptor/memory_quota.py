"""A memory quota for requests that are being received, and the fair queue of calls that wait for it.

Memory is reserved before anything is parsed. The queue serves one host after the other, and of each host one connection
after the other, so that a host with a thousand waiting calls delays another by at most one call.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from bottega.fair_order import fair_room
from bottega.rpc.address import Peer
from bottega.rpc.interceptor.call_limits import full

ReadT = TypeVar("ReadT")
KeyT = TypeVar("KeyT")

# Seconds in which a message must arrive, while no call waits for its memory and while one does.
_COMING_S = 30.0
_CONTENDED_S = 2.0
# Seconds for which a call waits for memory: longer than a message may take to arrive.
_WAIT_S = 3.0


class QuotaShare:
    """The memory that is reserved for one call's request, until the block ends or it is released."""

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
        """Reduce the reservation to the size of the message that has arrived."""
        freed_bytes = max(0, self._size_bytes - size_bytes)
        self._size_bytes -= freed_bytes
        self._quota.release(self._peer, freed_bytes, arrived=self._coming)
        self._coming = False

    def release(self) -> None:
        """Release the reservation, because the message is no longer in memory. A second call does nothing."""
        self.shrink(0)


class MemoryQuota:
    """A memory quota for requests of one kind, from the start of their arrival until they are released.

    gRPC reports neither how much of a message has arrived nor its announced size. So an arriving message counts as the
    largest one that gRPC accepts, and a caller may only have its share: one that opens calls and sends nothing only
    delays itself.

    Args:
        max_bytes: Upper bound on the memory of all requests.
        message_bytes: Memory that is reserved for an arriving message.
        share: Share of a host (or tenant), and for arriving messages that of one of its connections within the host's;
            see `fair_order.fair_room`. A caller without requests gets memory whenever there is some.
        contended_s: Seconds in which a message must arrive while another call waits for its memory.
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
        """Reserved bytes by host, for hosts with requests."""
        self._announced = Counter[Peer | str]()
        """Reserved bytes of arriving messages, by connection and by host."""
        self._waiting = FairQueue()
        self._coming: dict[asyncio.Timeout, float] = {}

    async def reserve(self, peer: Peer) -> QuotaShare:
        """Reserve memory for one message. Waiting callers get it in fair turns.

        Raises QueueFull, with the time to retry, if there is no memory soon.
        """
        if self._has_room(peer.host) and self._has_room_on(peer) and not self._waiting.has(peer):
            self._take(peer)
        else:
            await self._wait_for_turn(peer)
        return QuotaShare(self, peer)

    async def receive(self, read: Callable[[], Awaitable[ReadT]]) -> ReadT:
        """Return the message for which `read` waits. Raises QueueFull if it arrives too slowly."""
        scope = asyncio.timeout(self._contended_s if self._waiting else _COMING_S)
        self._coming[scope] = asyncio.get_running_loop().time()
        try:
            async with scope:
                return await read()
        except TimeoutError:
            if not scope.expired():
                raise
            raise full("the request arrived too slowly", limit="max_requests_mib") from None
        finally:
            del self._coming[scope]

    def release(self, peer: Peer, size_bytes: int, *, arrived: bool) -> None:
        """Release memory of a caller, and admit waiting calls.

        Args:
            arrived: Whether the message has arrived completely or its arrival has ended.
        """
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
        """Return whether a host may receive one more message now."""
        if self._free_bytes < self.message_bytes:
            return False
        if self._held[host] and fair_room(free=self._free_bytes, held=self._held[host], share=self._share) <= 0:
            return False
        return not self._announced[host] or self._host_room(host) >= self.message_bytes

    def _has_room_on(self, peer: Peer) -> bool:
        """Return whether a connection may receive one more message now, given that its host may."""
        announced, free = self._announced[peer], self._host_room(peer.host)
        return not announced or fair_room(free=free, held=announced, share=self._share) >= self.message_bytes

    def _host_room(self, host: str) -> float:
        """Return how many more bytes of a host's messages may be arriving."""
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
            raise full("there is no memory to receive more requests now", limit="max_requests_mib")

    def _shorten_waits(self) -> None:
        """End calls whose messages arrive slowly, because another call waits for memory."""
        now = asyncio.get_running_loop().time()
        for scope, began in self._coming.items():
            ends = scope.when()
            if ends is not None and not scope.expired() and ends > began + self._contended_s:
                scope.reschedule(max(now, began + self._contended_s))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallTurn:
    """A call that waits for its turn."""

    peer: Peer
    come: asyncio.Future[None]
    """Done when the call may proceed."""


class FairQueue:
    """A queue of waiting calls, by host and connection. `bool(queue)` is False when no call waits."""

    def __init__(self) -> None:
        # By host and by connection; the next in turn comes first. Empty entries are removed.
        self._hosts: dict[str, dict[Peer, deque[CallTurn]]] = {}

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def has(self, peer: Peer) -> bool:
        """Return whether a call of the connection waits."""
        return peer in self._hosts.get(peer.host, ())

    def add(self, peer: Peer) -> CallTurn:
        """Add a call to the queue."""
        turn = CallTurn(peer=peer, come=asyncio.get_running_loop().create_future())
        self._hosts.setdefault(peer.host, {}).setdefault(peer, deque()).append(turn)
        return turn

    def pop(self, *, host: Callable[[str], bool], connection: Callable[[Peer], bool]) -> CallTurn | None:
        """Remove and return the call whose turn is next, or None.

        Args:
            host: Returns whether a host may proceed now. Others are skipped, and keep their place.
            connection: Returns the same for a connection of such a host.
        """
        for name, peers in self._hosts.items():
            if not host(name):
                continue
            for peer, line in peers.items():
                if connection(peer):
                    return self._popped(peer, line)
        return None

    def remove(self, turn: CallTurn) -> None:
        """Remove a call from the queue."""
        connections = self._hosts[turn.peer.host]
        connections[turn.peer].remove(turn)
        if not connections[turn.peer]:
            del connections[turn.peer]
        if not connections:
            del self._hosts[turn.peer.host]

    def _popped(self, peer: Peer, line: deque[CallTurn]) -> CallTurn:
        """Return the first call of a connection. The connection and its host move to the end."""
        connections = self._hosts.pop(peer.host)
        del connections[peer]
        turn = line.popleft()
        if line:
            connections[peer] = line
        if connections:
            self._hosts[peer.host] = connections
        return turn


def _subtract(counts: Counter[KeyT], key: KeyT, size_bytes: int) -> None:
    counts[key] -= size_bytes
    if not counts[key]:
        del counts[key]
