"""Responses that their callers have not read yet: how many bytes of them a service holds, and for how long.

gRPC takes an answer when there is room on the way to its caller. Where the caller does not read, there is none, and the
answer stays in memory: for every call there is room for a small one, large ones share `max_bytes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from bottega.errors import ReaderStalled
from bottega.rpc.interceptor.call_limits import full

# Of an answer that needs no room in `max_bytes`; gRPC itself buffers 64 KiB of every call.
SMALL_BYTES = 96 << 10

# For a caller that does not read, while others are refused for want of what it holds: a MiB on a slow line.
_CONTENDED_S = 5.0

_responses: ContextVar[CallResponses | None] = ContextVar("bottega_responses", default=None)


def reserve(size_bytes: int) -> bool:
    """Whether the call that is served in this task may build an answer of that size: else it sends a smaller one."""
    responses = _responses.get()
    return responses is None or responses.reserve(size_bytes)


class ResponseFlowControl:
    """max_bytes: of large answers that are not taken yet. wait_s: for a caller to take one of a stream."""

    def __init__(self, *, max_bytes: int, wait_s: float) -> None:
        self._max_bytes = max_bytes
        self._wait_s = wait_s
        self._held_bytes = 0
        self._unread: dict[asyncio.Timeout, float] = {}

    def shorten_waits(self) -> None:
        """A caller was refused for want of room: calls that do not read are ended soon."""
        now = asyncio.get_running_loop().time()
        for scope, began in self._unread.items():
            ends = scope.when()
            if ends is not None and not scope.expired() and ends > began + _CONTENDED_S:
                scope.reschedule(max(now, began + _CONTENDED_S))

    def try_hold(self, size_bytes: int, own_bytes: int) -> bool:
        """Holds so much more for a call that has `own_bytes`, if there is room. An only one is never too large."""
        if self._held_bytes + size_bytes > self._max_bytes and self._held_bytes > own_bytes:
            return False
        self._held_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """So much is free again."""
        self._held_bytes -= size_bytes

    async def wait_until_read(self, writing: Awaitable[object]) -> None:
        """Waits until the caller has taken an answer. Raises ReaderStalled when that takes too long."""
        scope = asyncio.timeout(self._wait_s)
        self._unread[scope] = asyncio.get_running_loop().time()
        try:
            async with scope:
                await writing
        except TimeoutError:
            if not scope.expired():
                raise
            raise ReaderStalled("an answer was not read in time; ask again") from None
        finally:
            del self._unread[scope]


class CallResponses:
    """Those of one call."""

    def __init__(self, flow: ResponseFlowControl) -> None:
        self._flow = flow
        self._held_bytes = 0

    def bind(self) -> None:
        """`reserve` is for this call, in the current task and those that it starts from now on."""
        _responses.set(self)

    def reserve(self, size_bytes: int) -> bool:
        """Room for the next answer, what there is already included, until it is taken; False when there is none."""
        more_bytes = size_bytes - self._held_bytes
        if size_bytes <= SMALL_BYTES or more_bytes <= 0:
            return True
        if not self._flow.try_hold(more_bytes, self._held_bytes):
            return False
        self._held_bytes = size_bytes
        return True

    def admit(self, raw: bytes) -> bytes:
        """An answer for which there is room. Raises QueueFull when there is none."""
        if not self.reserve(len(raw)):
            self._flow.shorten_waits()
            raise full("as many answers wait to be read as there is memory for", limit="max_answers_mib")
        return raw

    async def send(self, raw: bytes, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Writes one answer. Raises QueueFull, ReaderStalled; after that what gRPC has of it is still held."""
        await self._flow.wait_until_read(write(self.admit(raw)))
        self.release()

    def release(self) -> None:
        """All is taken, or the call is over. Harmless when done before."""
        self._flow.give_back(self._held_bytes)
        self._held_bytes = 0
