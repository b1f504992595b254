"""Work of an event loop that is done to its end even if the task that waits for it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def run_to_end(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What `work` returns or raises. A caller that is cancelled, even more than once, is so when the work has ended.

    For what must be neither half done nor forgotten, such as a file that is made or removed: a caller may go at any
    moment, also while what it left is being cleared away.
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
            task.exception()  # it is looked at: what is said is that the caller has gone
        raise cancelled
    return task.result()


@asynccontextmanager
async def acquired(make: Callable[[], ResultT], unmake: Callable[[ResultT], object]) -> AsyncIterator[ResultT]:
    """In the block, what `make` returns; afterwards it is unmade, whenever the caller is cancelled.

    Both run in threads. Raises what they raise.
    """
    there: list[ResultT] = []
    try:
        await run_to_end(asyncio.to_thread(lambda: there.append(make())))
        yield there[0]
    finally:
        for each in there:
            await run_to_end(asyncio.to_thread(unmake, each))
