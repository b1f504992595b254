"""Limits on the bytes of responses that callers have not read yet, and on the time that they have.

gRPC accepts an answer when there is room on the way to the caller. If the caller does not read, the answer stays in
memory. Every call has room for a small answer; large ones share `max_bytes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from bottega.errors import ReaderStalled
from bottega.rpc.interceptor.call_limits import full

# Answers up to this size do not count towards `max_bytes`; gRPC itself buffers 64 KiB of every call.
SMALL_BYTES = 96 << 10

# Time for a caller to read while others are refused because of it: enough for a MiB on a slow line.
_CONTENDED_S = 5.0

_responses: ContextVar[CallResponses | None] = ContextVar("bottega_responses", default=None)


def reserve(size_bytes: int) -> bool:
    """Return whether the call of this task may build an answer of that size. Otherwise it should send a smaller one."""
    responses = _responses.get()
    return responses is None or responses.reserve(size_bytes)


class ResponseFlowControl:
    """A limit on the memory of unread responses of all calls.

    Args:
        max_bytes: Bytes of large answers that are not read yet.
        wait_s: Seconds for a caller to read an answer of a stream.
    """

    def __init__(self, *, max_bytes: int, wait_s: float) -> None:
        self._max_bytes = max_bytes
        self._wait_s = wait_s
        self._held_bytes = 0
        self._unread: dict[asyncio.Timeout, float] = {}

    def shorten_waits(self) -> None:
        """End calls that do not read soon, because another caller was refused."""
        now = asyncio.get_running_loop().time()
        for scope, began in self._unread.items():
            ends = scope.when()
            if ends is not None and not scope.expired() and ends > began + _CONTENDED_S:
                scope.reschedule(max(now, began + _CONTENDED_S))

    def try_hold(self, size_bytes: int, own_bytes: int) -> bool:
        """Reserve more bytes for a call that holds `own_bytes`, and return whether there is room.

        There always is room for the only call that holds any.
        """
        if self._held_bytes + size_bytes > self._max_bytes and self._held_bytes > own_bytes:
            return False
        self._held_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """Release bytes."""
        self._held_bytes -= size_bytes

    async def wait_until_read(self, writing: Awaitable[object]) -> None:
        """Wait until the caller has read an answer. Raises ReaderStalled if that takes too long."""
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
    """The responses of one call."""

    def __init__(self, flow: ResponseFlowControl) -> None:
        self._flow = flow
        self._held_bytes = 0

    def bind(self) -> None:
        """Make `reserve` of this module use this call, in the current task and tasks that it starts."""
        _responses.set(self)

    def reserve(self, size_bytes: int) -> bool:
        """Reserve room for the next answer until it is read. Return False if there is none."""
        more_bytes = size_bytes - self._held_bytes
        if size_bytes <= SMALL_BYTES or more_bytes <= 0:
            return True
        if not self._flow.try_hold(more_bytes, self._held_bytes):
            return False
        self._held_bytes = size_bytes
        return True

    def admit(self, raw: bytes) -> bytes:
        """Return an answer after reserving room for it. Raises QueueFull without room."""
        if not self.reserve(len(raw)):
            self._flow.shorten_waits()
            raise full("as many answers wait to be read as there is memory for", limit="max_answers_mib")
        return raw

    async def send(self, raw: bytes, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Write one answer. Raises QueueFull or ReaderStalled; the room then stays reserved, as gRPC has the answer."""
        await self._flow.wait_until_read(write(self.admit(raw)))
        self.release()

    def release(self) -> None:
        """Release the room: everything is read, or the call is over. A second call does nothing."""
        self._flow.give_back(self._held_bytes)
        self._held_bytes = 0
