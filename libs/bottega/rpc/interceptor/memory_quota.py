"""How much of its calls' requests a service takes in at once: a bound that holds before anything is parsed.

A message that is still coming counts as the largest that it may be, as its size is not known before it is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar

from bottega.rpc.interceptor.call_limits import full
from bottega.rpc.interceptor.fair_queue import FairQueue
from bottega.rpc.peers import Peer

ReadT = TypeVar("ReadT")

# For a message on a slow line while nobody waits for the room that it takes, and while somebody does.
_COMING_S = 30.0
_CONTENDED_S = 2.0
# Longer than what is in the way may stay there.
_WAIT_S = 3.0


class QuotaShare:
    """What the request of one call takes of the quota, until the block ends or it is released."""

    def __init__(self, quota: MemoryQuota, size_bytes: int) -> None:
        self._quota = quota
        self._size_bytes = size_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def shrink(self, size_bytes: int) -> None:
        """The message is here, and only so large."""
        self._quota.release(max(0, self._size_bytes - size_bytes))
        self._size_bytes = min(self._size_bytes, size_bytes)

    def release(self) -> None:
        """Nobody holds the message any more. Harmless when done before."""
        self.shrink(0)


class MemoryQuota:
    """max_bytes: of requests that are coming, or that somebody still holds. message_bytes: the most of one of them."""

    def __init__(self, *, max_bytes: int, message_bytes: int) -> None:
        assert max_bytes >= message_bytes
        self._free_bytes = max_bytes
        self.message_bytes = message_bytes
        self._waiting = FairQueue()
        self._coming: dict[asyncio.Timeout, float] = {}

    async def reserve(self, peer: Peer) -> QuotaShare:
        """Room for one message of a caller; callers that wait for it get it in fair turns.

        Raises QueueFull, with the time after which to ask again, when there is none soon.
        """
        if self._waiting or self._free_bytes < self.message_bytes:
            await self._wait_for_turn(peer)
        else:
            self._free_bytes -= self.message_bytes
        return QuotaShare(self, self.message_bytes)

    async def receive(self, read: Callable[[], Awaitable[ReadT]]) -> ReadT:
        """The message that `read` waits for. Raises QueueFull when it takes long while others wait for the room."""
        scope = asyncio.timeout(_CONTENDED_S if self._waiting else _COMING_S)
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

    def release(self, size_bytes: int) -> None:
        """So much is free again."""
        self._free_bytes += size_bytes
        while self._waiting and self._free_bytes >= self.message_bytes:
            self._free_bytes -= self.message_bytes
            self._waiting.pop().set_result(None)

    async def _wait_for_turn(self, peer: Peer) -> None:
        turn = self._waiting.add(peer)
        self._shorten_waits()
        try:
            await asyncio.wait([turn], timeout=_WAIT_S)
        except asyncio.CancelledError:
            if turn.done():
                self.release(self.message_bytes)
            else:
                self._waiting.remove(peer, turn)
            raise
        if not turn.done():
            self._waiting.remove(peer, turn)
            raise full("as many requests are taken in as there is memory for", limit="max_requests_mib")

    def _shorten_waits(self) -> None:
        """A caller waits for room: calls that send slowly are ended."""
        now = asyncio.get_running_loop().time()
        for scope, began in self._coming.items():
            ends = scope.when()
            if ends is not None and not scope.expired() and ends > began + _CONTENDED_S:
                scope.reschedule(max(now, began + _CONTENDED_S))
