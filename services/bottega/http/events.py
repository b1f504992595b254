"""Streams of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import anyio
from pydantic_core import to_json
from sse_starlette import EventSourceResponse

PING_S = 15.0
"""Seconds without an event after which a comment is sent, so that proxies keep the connection."""

_PING = b": ping\n\n"


def event(name: str, data: object, *, event_id: str = "") -> bytes:
    """Return an event with data in JSON, which has no line breaks.

    Args:
        event_id: Id for the header Last-Event-ID; "" for none.
    """
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {name}\ndata: ".encode() + to_json(data, inf_nan_mode="null") + b"\n\n"


def event_stream(parts: AsyncGenerator[bytes, None]) -> EventSourceResponse:
    """Return an answer that streams events. A part need not be a whole event."""
    # Its own pings could come between the parts of an event.
    return EventSourceResponse(parts, ping=0, headers={"cache-control": "no-store"})


async def with_pings(
    parts: AsyncGenerator[bytes, None], ended: asyncio.Event | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield what `parts` yields, and pings while nothing comes, until `ended` is set."""
    stopping = asyncio.ensure_future((ended or asyncio.Event()).wait())
    async with aclosing(parts):
        try:
            while not stopping.done():
                coming = asyncio.ensure_future(_next(parts))
                try:
                    while not await _first_done(coming, stopping):
                        yield _PING
                    part = coming.result() if coming.done() else None
                finally:
                    coming.cancel()
                    with anyio.CancelScope(shield=True):  # `parts` can be closed only when nothing waits for it
                        await asyncio.gather(coming, return_exceptions=True)
                if part is None:
                    return
                yield part
        finally:
            stopping.cancel()


async def _first_done(*tasks: asyncio.Future[Any]) -> bool:
    """Wait until one of the tasks is done, and return whether that was before a ping is due."""
    done, _ = await asyncio.wait(tasks, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


async def _next(parts: AsyncIterator[bytes]) -> bytes | None:
    return await anext(parts, None)
