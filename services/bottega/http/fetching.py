"""Fetches the input images that requests name by URL, from hosts that an operator allows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel
from starlette.requests import Request

from bottega.codec.structure import MAX_IMAGE_BYTES
from bottega.errors import AddressRefused, QueueFull, Violation
from bottega.http.bodies import JobBody, PictureBody
from bottega.http.config import FetchConfig
from bottega.http.errors import FieldsRefused
from bottega.http.input_images import RemoteImage
from bottega.http.limits import PeerLimit
from bottega.http.reading import BodyReader, host_of_request
from bottega.rules import refuse

if TYPE_CHECKING:
    import httpx

    from bottega.outside_address import Resolve

_HEADERS = {"accept": "image/png, image/jpeg, image/webp", "accept-encoding": "identity", "user-agent": "bottega"}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

_log = logging.getLogger(__name__)


class _NotFetched(Exception):
    """An image cannot be fetched; the message says why, for the caller."""


class ImageFetcher:
    """Fetches images within the operator's rules, and within a size and a time.

    Bytes are counted as part of the request's body. They are decoded where uploads are, in the gateway's and the
    workers' codec processes. What a name resolves to inside is not told to callers.

    Args:
        peer_share: Share of `max_at_once` that one host may use.
        resolve: Resolves host names; None for the system's resolver.
    """

    def __init__(
        self, config: FetchConfig, bodies: BodyReader, *, peer_share: float, resolve: Resolve | None = None
    ) -> None:
        self._config = config
        self._bodies = bodies
        self._resolve = resolve
        self._http: httpx.AsyncClient | None = None
        self._running = PeerLimit(config.max_at_once, peer_share)

    async def fetch(self, request: Request, images: Mapping[str, RemoteImage]) -> dict[str, bytes]:
        """Return images by the fields of a request that name them.

        Raises:
            InvalidRequest: URLs are not allowed, or images cannot be fetched; the error names each field.
            QueueFull: Too many images are being fetched, or there is no memory for them now.
        """
        if not images:
            return {}
        refuse([*filter(None, map(self._refusal, images, images.values()))], FieldsRefused)
        host = host_of_request(request)
        if not self._running.take(host, len(images)):
            raise QueueFull("the service fetches as many images as it may; retry", retry_after_s=1.0)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._fetched(request, image)) for image in images.values()]
        finally:
            self._running.give(host, len(images))
        results = dict(zip(images, (task.result() for task in tasks), strict=True))
        for result in results.values():
            if isinstance(result, QueueFull):
                raise result
        refuse(
            [
                Violation(field=field, description=f"cannot be fetched: {result}")
                for field, result in results.items()
                if isinstance(result, _NotFetched)
            ],
            FieldsRefused,
        )
        return {field: result for field, result in results.items() if isinstance(result, bytes)}

    async def close(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.aclose()

    def _refusal(self, field: str, image: RemoteImage) -> Violation | None:
        if not self._config.allows_any:
            rule = "is a URL, and this service fetches none: send the image itself, in base64 or as a file"
            return Violation(field=field, description=rule)
        try:
            self._config.check(image.url)
        except AddressRefused as error:
            return Violation(field=field, description=f"is not fetched: {error.message}")
        return None

    async def _fetched(self, request: Request, image: RemoteImage) -> bytes | _NotFetched | QueueFull:
        import httpx

        began_s, why = time.monotonic(), ""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await self._follow(request, image.url)
        except QueueFull as error:
            return error
        except TimeoutError:
            why = f"it did not come within {self._config.timeout_s:g} s"
        except _NotFetched as error:
            why = str(error)
        except AddressRefused:
            why = "the URL leads to an address that must not be called"
        except httpx.TimeoutException:
            why = "its server does not answer"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):  # ValueError: an address that is none
            why = "its server cannot be reached, or ends the connection"
        facts = {"host": httpx.URL(image.url).host, "seconds": round(time.monotonic() - began_s, 3), "text": why}
        _log.info("an image was not fetched", extra=facts)
        return _NotFetched(why)

    async def _follow(self, request: Request, url: str) -> bytes:
        from bottega.outside_address import SHARE

        client = self._client()
        share = {SHARE: host_of_request(request)}
        for _ in range(self._config.max_redirects + 1):
            # httpx would read the whole body of a redirect, however long it is.
            async with client.stream("GET", url, headers=_HEADERS, extensions=share) as answer:
                if answer.status_code == 200:
                    return await self._read(request, answer)
                if answer.status_code not in _REDIRECTS:
                    raise _NotFetched(f"its server answers with status {answer.status_code}")
                url = str(answer.url.join(answer.headers.get("location", "")))
            self._config.check(url)
        raise _NotFetched(f"its server redirects more than {self._config.max_redirects} times")

    async def _read(self, request: Request, answer: httpx.Response) -> bytes:
        encoding = answer.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise _NotFetched("its server compresses it, although it was asked not to")
        data = bytearray()
        async for chunk in answer.aiter_raw():
            if len(data) + len(chunk) > MAX_IMAGE_BYTES:
                raise _NotFetched(f"it has more than {MAX_IMAGE_BYTES} bytes")
            self._bodies.hold(request, len(chunk))
            data += chunk
        return bytes(data)

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            from bottega.outside_address import PinnedTransport, outside_client

            transport = PinnedTransport(self._config, resolve=self._resolve)
            self._http = outside_client(transport, timeout_s=self._config.timeout_s)
        return self._http


def remote_images(body: PictureBody) -> dict[str, RemoteImage]:
    """Return the images that a body names by URL, by their fields."""
    images = {field: getattr(model, field.rpartition(".")[2]) for field, model in _image_holders(body)}
    return {field: image for field, image in images.items() if isinstance(image, RemoteImage)}


def set_images(body: PictureBody, images: Mapping[str, bytes]) -> None:
    """Replace images of a body by their fields."""
    for field, model in _image_holders(body):
        if field in images:
            setattr(model, field.rpartition(".")[2], images[field])


def _image_holders(body: PictureBody) -> Iterator[tuple[str, BaseModel]]:
    """Yield the fields of a body that are images, each with the model that has it."""
    if isinstance(body, JobBody):
        yield from (("image", body), ("mask", body))
    for index, net in enumerate((body.bottega.controlnets if body.bottega else None) or ()):
        yield f"bottega.controlnets[{index}].image", net
