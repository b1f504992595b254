"""A plain static server, the baseline of batching: requests that go together, at most eight, run to the end.

A static batch cannot let a member go early: all of them are answered when it is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_BATCH = 8
REQUEST_TIMEOUT_S = 600.0

RequestT = TypeVar("RequestT")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting(Generic[RequestT]):
    request: RequestT
    done: asyncio.Future[None]


class StaticServer(Generic[RequestT]):
    """Draws requests batch by batch. The one that waits longest is in the next batch. `stop` it.

    Args:
        draw: Draws a batch, and is called in a thread; what it raises, every request of the batch raises.
        together: Requests for which it is equal may be in one batch; by default all may.
    """

    def __init__(
        self,
        draw: Callable[[Sequence[RequestT]], object],
        *,
        together: Callable[[RequestT], Hashable] = lambda _: None,
    ) -> None:
        self._draw = draw
        self._together = together
        self._queue: deque[_Waiting[RequestT]] = deque()
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._serve())

    async def draw(self, request: RequestT) -> None:
        """Draw one picture. Raises TimeoutError when none comes. A request that is cancelled leaves the queue."""
        waiting = _Waiting(request=request, done=asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._arrived.set()
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await waiting.done

    async def stop(self) -> None:
        """Stop serving, and drop what waits."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _serve(self) -> None:
        while True:
            await self._arrived.wait()
            if members := self._next_batch():
                await self._draw_batch(members)
            else:
                self._arrived.clear()

    def _next_batch(self) -> list[_Waiting[RequestT]]:
        """Take the next batch out of the queue; it may be empty."""
        waiting = [each for each in self._queue if not each.done.done()]
        key = self._together(waiting[0].request) if waiting else None
        members = [each for each in waiting if self._together(each.request) == key][:MAX_BATCH]
        taken = set(map(id, members))
        self._queue = deque(each for each in waiting if id(each) not in taken)
        return members

    async def _draw_batch(self, members: Sequence[_Waiting[RequestT]]) -> None:
        try:
            await asyncio.to_thread(self._draw, [member.request for member in members])
        except Exception as error:  # noqa: BLE001 - its requests raise it, and the next batch is drawn
            for member in members:
                if not member.done.done():
                    member.done.set_exception(error)
            return
        for member in members:
            if not member.done.done():
                member.done.set_result(None)
