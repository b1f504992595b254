"""Calls that wait for a codec process, and the order in which they are served. Knows no process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bottega.errors import BottegaError
from bottega.v1 import codec_pb2


@dataclass(slots=True, kw_only=True, eq=False)
class CodecRequest:
    """A call that waits or is served.

    build: makes the message, copying `size_bytes`.
    large: whether it may take a process for long.
    blame: the error for a call that took its process along.
    begun: whether a process has it.
    """

    build: Callable[[], codec_pb2.CodecCall]
    size_bytes: int
    large: bool
    blame: type[BottegaError]
    result: asyncio.Future[codec_pb2.CodecAnswer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    begun: bool = False

    def fail(self, error: BottegaError) -> None:
        """Does nothing to one that has its answer."""
        if not self.result.done():
            self.result.set_exception(error)


class CodecQueue:
    """First come, first served; at most `max_waiting`, half of them large, so that large ones never fill it."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._calls: deque[CodecRequest] = deque()
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: CodecRequest) -> bool:
        """Whether there was room for it."""
        if not self._has_room(call):
            # Those who do not wait any more keep no room.
            self._calls = deque(waiting for waiting in self._calls if not waiting.result.done())
        if not self._has_room(call):
            return False
        self._calls.append(call)
        self._arrived.set()
        return True

    async def get(self, *, large: bool) -> CodecRequest:
        """The next one. large: whether it may be a large one."""
        while (call := self._take(large)) is None:
            self._arrived.clear()
            await self._arrived.wait()
        return call

    def get_all(self) -> list[CodecRequest]:
        """What waits now; afterwards nothing does."""
        calls, self._calls = list(self._calls), deque()
        return calls

    def _take(self, large: bool) -> CodecRequest | None:
        for call in self._calls:
            if large or not call.large:
                self._calls.remove(call)
                return call
        return None

    def _has_room(self, call: CodecRequest) -> bool:
        if call.large and sum(waiting.large for waiting in self._calls) >= max(1, self._max_waiting // 2):
            return False
        return len(self._calls) < self._max_waiting
