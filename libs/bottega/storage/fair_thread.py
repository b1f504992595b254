"""A storage thread whose callers take turns by owner, so that one with many calls holds up nobody else."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from bottega.storage.os_errors import BUSY, unavailable
from bottega.storage.thread import StorageThread

ResultT = TypeVar("ResultT")

# One that runs, and one that is there when it ends.
_AT_ONCE = 2
# Calls of one owner that may wait: more than a gateway serves streams at once.
_MAX_WAITING = 4096


class FairStorageThread:
    """Runs blocking work of several owners, a piece of each in turn. Everything is awaited in one event loop."""

    def __init__(self, name: str) -> None:
        self._thread = StorageThread(name)
        self._running = 0
        # By owner; the one whose turn is next is first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, do: Callable[[], ResultT], *, owner: str) -> ResultT:
        """Return what `do` returns or raises. Raise StorageUnavailable as StorageThread does."""
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
        line = self._waiting.setdefault(owner, deque())
        if len(line) >= _MAX_WAITING:
            raise unavailable("too many operations wait for the disk", cause=BUSY)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had come
                self._end_turn()
            raise

    def _end_turn(self) -> None:
        self._running -= 1
        while self._waiting and self._running < _AT_ONCE:
            owner = next(iter(self._waiting))
            line = self._waiting.pop(owner)
            turn = line.popleft()
            if line:
                self._waiting[owner] = line
            if not turn.done():
                self._running += 1
                turn.set_result(None)
