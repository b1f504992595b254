"""A thread whose callers take turns by owner, so that an owner with many calls does not delay the others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from bottega.storage.os_errors import BUSY, unavailable
from bottega.storage.thread import SerialThread

ResultT = TypeVar("ResultT")

# One call runs, and the next one waits in the thread's own queue.
_AT_ONCE = 2
# Maximum number of waiting calls of one owner: more than the streams that a gateway serves at once.
_MAX_WAITING = 4096


class FairThread:
    """A thread that runs blocking work of several owners in turns. It is used from one event loop."""

    def __init__(self, name: str) -> None:
        self._thread = SerialThread(name)
        self._running = 0
        # Waiting calls by owner; the owner whose turn is next comes first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, do: Callable[[], ResultT], *, owner: str) -> ResultT:
        """Return what `do` returns or raises. Raises StorageUnavailable as SerialThread.run does."""
        await self._wait_for_turn(owner)
        try:
            return await self._thread.run(do)
        finally:
            self._end_turn()

    async def close(self) -> None:
        """End the thread after the work that it has begun."""
        await self._thread.close()

    async def _wait_for_turn(self, owner: str) -> None:
        if self._running < _AT_ONCE and not self._waiting:
            self._running += 1
            return
        queue = self._waiting.setdefault(owner, deque())
        if len(queue) >= _MAX_WAITING:
            raise unavailable("too many operations wait for the disk", cause=BUSY)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had come
                self._end_turn()
            raise

    def _end_turn(self) -> None:
        self._running -= 1
        while self._waiting and self._running < _AT_ONCE:
            owner = next(iter(self._waiting))
            queue = self._waiting.pop(owner)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue
            if not turn.done():
                self._running += 1
                turn.set_result(None)
