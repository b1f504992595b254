"""Work of an event loop that runs to its end even if the task that awaits it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def run_to_end(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return or raise what `work` does. If the caller is cancelled, CancelledError is raised after the work has ended.

    It is for work that must not stop halfway, such as creating or removing a file.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved, because CancelledError is raised in its place
        raise cancelled
    return task.result()


@asynccontextmanager
async def acquired(make: Callable[[], ResultT], unmake: Callable[[ResultT], object]) -> AsyncIterator[ResultT]:
    """Yield the result of `make`, and pass it to `unmake` after the block, even if the caller is cancelled.

    Both run in threads, and may raise.
    """
    made: list[ResultT] = []
    try:
        await run_to_end(asyncio.to_thread(lambda: made.append(make())))
        yield made[0]
    finally:
        for resource in made:
            await run_to_end(asyncio.to_thread(unmake, resource))
