"""The values that all routes of the application share, and waiting that ends when a client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar, cast

from starlette.requests import Request

from bottega.errors import JobCancelled
from bottega.http.config import HttpConfig
from bottega.http.gateway import ForwardingClient
from bottega.http.pictures import UrlSeal
from bottega.http.reading import BodyReader

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The values that all routes of the application share."""

    config: HttpConfig
    client: ForwardingClient
    bodies: BodyReader
    urls: UrlSeal
    draining: asyncio.Event
    """Set when the service stops: streams that would not end by themselves end then."""

    def url(self, request: Request, path: str) -> str:
        """Return the URL of a path, as the client of a request reaches it."""
        base = self.config.public_url or f"{request.url.scheme}://{request.url.netloc}"
        return f"{base.rstrip('/')}{path}"


def context_of(request: Request) -> Context:
    """Return the context of the application that serves a request."""
    return cast("Context", request.app.state.context)


async def unless_client_leaves(request: Request, work: Awaitable[ResultT]) -> ResultT:
    """Return the result of some work. If the client leaves first, cancel the work and raise JobCancelled."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_until_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise JobCancelled("the client left")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
