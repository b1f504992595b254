"""Limits on the calls that a service serves at the same time, and on the bytes of unread responses.

The more calls there are, the fewer one host may have, so that some places are always left for another host.

gRPC accepts a response when it has buffer space for it. If the caller does not read, the response stays in memory.
Every call may hold a small response. Large responses of all calls share `max_bytes`, and must be read in time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from bottega.errors import QueueFull, ReaderStalled
from bottega.fair_order import fair_room
from bottega.rpc.address import Peer

# Bytes up to which a response does not count towards `max_bytes`; gRPC itself buffers 64 KiB of every call.
SMALL_BYTES = 96 << 10

# Time for a caller to read while others are refused because of it: enough for a MiB on a slow line.
_CONTENDED_S = 5.0

_responses: ContextVar[CallResponses | None] = ContextVar("bottega_responses", default=None)
# Most calls end sooner. The time is random so that callers that were refused together do not retry together.
_RETRY_S = (0.5, 1.5)


@dataclass(slots=True)
class CallCounter:
    """Counts the calls of a host, of a connection, or of all."""

    active: int = 0
    """Number of calls that are being served."""
    opened: int = 0
    """Number of active calls, plus ended calls whose responses were not read completely."""

    @property
    def count(self) -> int:
        """The number of calls. An ended one with unread responses counts half, because it takes little memory."""
        return max(self.active, self.opened // 2)


class CallLimit:
    """A limit on the calls of one kind.

    Args:
        max_calls: Upper bound on the calls of all callers.
        share: Share of a host, and of a connection within its host; see `fair_room`.
        limit: Field of ServerConfig with the limit, for error texts.
    """

    def __init__(self, *, max_calls: int, share: float, limit: str) -> None:
        self._max_calls = max_calls
        self._share = share
        self._limit = limit
        self._all = CallCounter()
        self._held: dict[Peer | str, CallCounter] = {}  # by connections and hosts that have any

    def acquire(self, peer: Peer) -> CallSlot:
        """Reserve a place for one call. Raises QueueFull, with the time to retry, if there is none."""
        host, connection = self._held.get(peer.host, _NONE), self._held.get(peer, _NONE)
        free = self._max_calls - self._all.count
        if free <= 0:
            raise full("the server serves its maximum number of calls", limit=self._limit)
        host_room = fair_room(free=free, held=host.count, share=self._share)
        if host_room <= 0:
            raise full("your host has reached its share of open calls", limit=self._limit)
        if fair_room(free=host_room, held=connection.count, share=self._share) <= 0:
            raise full("your connection has reached its share of open calls", limit=self._limit)
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
    """The place of one call in a CallLimit.

    Args:
        counters: Counters in which the call counts.
        when_closed: Called when its last resources are released.
    """

    def __init__(self, counters: Sequence[CallCounter], when_closed: Callable[[], None]) -> None:
        self._counters = counters
        self._when_closed = when_closed
        for counter in counters:
            counter.active += 1
            counter.opened += 1

    def end_serving(self) -> None:
        """Record that the call has ended, although its caller may not have read all responses."""
        for counter in self._counters:
            counter.active -= 1

    def release(self) -> None:
        """Record that the caller has read all responses, or has disconnected."""
        for counter in self._counters:
            counter.opened -= 1
        self._when_closed()


_NONE = CallCounter()


def full(message: str, *, limit: str) -> QueueFull:
    """Return the error for a call that exceeds a limit.

    Args:
        limit: Field of ServerConfig with the limit.
    """
    return QueueFull(f"{message}; retry", metadata={"limit": limit}, retry_after_s=random.uniform(*_RETRY_S))


def reserve(size_bytes: int) -> bool:
    """Return whether the current call may build a response of that size. If not, it should send a smaller one."""
    responses = _responses.get()
    return responses is None or responses.reserve(size_bytes)


class ResponseFlowControl:
    """A limit on the memory of unread responses of all calls.

    Args:
        max_bytes: Upper bound on the bytes of large responses that are not read yet.
        wait_s: Seconds in which a caller must read a response of a stream.
    """

    def __init__(self, *, max_bytes: int, wait_s: float) -> None:
        self._max_bytes = max_bytes
        self._wait_s = wait_s
        self._held_bytes = 0
        self._unread: dict[asyncio.Timeout, float] = {}

    def shorten_waits(self) -> None:
        """End calls whose callers do not read soon, because another caller was refused for lack of memory."""
        now = asyncio.get_running_loop().time()
        for scope, began in self._unread.items():
            ends = scope.when()
            if ends is not None and not scope.expired() and ends > began + _CONTENDED_S:
                scope.reschedule(max(now, began + _CONTENDED_S))

    def try_hold(self, size_bytes: int, own_bytes: int) -> bool:
        """Reserve more bytes for a call that holds `own_bytes`. Return whether that was possible.

        It always is for the only call that holds any.
        """
        if self._held_bytes + size_bytes > self._max_bytes and self._held_bytes > own_bytes:
            return False
        self._held_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """Release bytes."""
        self._held_bytes -= size_bytes

    async def wait_until_read(self, writing: Awaitable[object]) -> None:
        """Wait until the caller has read a response. Raises ReaderStalled if that takes too long."""
        scope = asyncio.timeout(self._wait_s)
        self._unread[scope] = asyncio.get_running_loop().time()
        try:
            async with scope:
                await writing
        except TimeoutError:
            if not scope.expired():
                raise
            raise ReaderStalled("the client did not read the response in time; retry") from None
        finally:
            del self._unread[scope]


class CallResponses:
    """The unread responses of one call."""

    def __init__(self, flow: ResponseFlowControl) -> None:
        self._flow = flow
        self._held_bytes = 0

    def bind(self) -> None:
        """Make this object the one that the function `reserve` uses, in the current task and tasks that it starts."""
        _responses.set(self)

    def reserve(self, size_bytes: int) -> bool:
        """Reserve memory for the next response until it is read. Return False if there is not enough."""
        more_bytes = size_bytes - self._held_bytes
        if size_bytes <= SMALL_BYTES or more_bytes <= 0:
            return True
        if not self._flow.try_hold(more_bytes, self._held_bytes):
            return False
        self._held_bytes = size_bytes
        return True

    def admit(self, raw: bytes) -> bytes:
        """Reserve memory for a response and return the response. Raises QueueFull if there is not enough."""
        if not self.reserve(len(raw)):
            self._flow.shorten_waits()
            raise full("there is no memory for more responses until callers read earlier ones", limit="max_answers_mib")
        return raw

    async def send(self, raw: bytes, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Write a response. After QueueFull or ReaderStalled its memory stays reserved, because gRPC holds it."""
        await self._flow.wait_until_read(write(self.admit(raw)))
        self.release()

    def release(self) -> None:
        """Release the memory, because everything is read or the call is over. A second call does nothing."""
        self._flow.give_back(self._held_bytes)
        self._held_bytes = 0
