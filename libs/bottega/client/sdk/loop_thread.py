"""An event loop in a thread, for callers without asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Seconds that a call may take to end after Ctrl-C, which needs no network.
_CANCEL_S = 2.0
# Seconds that a task may take to end when it is cancelled once more, because it missed the interrupt.
_CLOSE_S = 2.0


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bottega-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it. If the wait is interrupted, cancel it and wait for its end."""
        ended = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_set_when_ended(coroutine, ended), self._loop)
        try:
            return future.result()
        except BaseException:
            # After Ctrl-C, the coroutine must cancel its job before close().
            if future.cancel():
                ended.wait(_CANCEL_S)
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yield items on demand, and close `items` at the end. No item may be None."""
        iteration = _Iteration(items)
        try:
            while (item := self.run(iteration.next())) is not None:
                yield item
        finally:
            self.run(iteration.close())

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Iteration(Generic[T]):
    """An asynchronous generator that yields one item at a time, and may be closed while it computes one."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._next_task: asyncio.Task[Any] | None = None

    async def next(self) -> T | None:
        """Return the next item; None at the end."""
        self._next_task = asyncio.current_task()
        try:
            return await anext(self._items, None)
        finally:
            self._next_task = None

    async def close(self) -> None:
        """Cancel a running call and close the generator, which cannot be closed while it runs."""
        if self._next_task is not None:
            if not self._next_task.cancelling():
                self._next_task.cancel()
            await asyncio.wait({self._next_task}, timeout=_CLOSE_S)
        await self._items.aclose()


async def _set_when_ended(coroutine: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await coroutine
    finally:
        ended.set()
