"""The values that all routes of the application share, and waiting that ends when a client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar, cast

from starlette.requests import Request

from bottega.errors import JobCancelled
from bottega.http.bodies import PictureBody
from bottega.http.config import HttpConfig
from bottega.http.fetching import ImageFetcher, remote_images, set_images
from bottega.http.gateway import ForwardingClient
from bottega.http.input_images import RemoteImage
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
    fetcher: ImageFetcher
    draining: asyncio.Event
    """Set when the service stops: streams that would not end by themselves end then."""

    def url(self, request: Request, path: str) -> str:
        """Return the URL of a path, as the client of a request reaches it."""
        base = self.config.public_url or f"{request.url.scheme}://{request.url.netloc}"
        return f"{base.rstrip('/')}{path}"


async def fetch_images(
    request: Request, body: PictureBody, named: Mapping[str, RemoteImage] = MappingProxyType({})
) -> dict[str, bytes]:
    """Fetch the images that a request names by URL, and put them into its body.

    Args:
        named: Images by URL that are not in the body, by their fields.

    Returns:
        The images of `named`.

    Raises:
        InvalidRequest: URLs are not allowed, or an image cannot be fetched.
        QueueFull: Too many images are being fetched.
    """
    wanted = {**named, **remote_images(body)}
    if not wanted:
        return {}
    context = context_of(request)
    await context.client.check_key()  # strangers must not have anything fetched
    found = await unless_client_leaves(request, context.fetcher.fetch(request, wanted))
    set_images(body, found)
    return {field: found[field] for field in named}


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
