"""Finished pictures as answers: in base64, as files, and as URLs that expire."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from bottega.client.sdk.aio_job import AsyncJob
from bottega.client.types.picture import Picture
from bottega.errors import ImageNotFound
from bottega.rpc.security.api_keys import bearer

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

# A multiple of 3, so that the parts of a base64 text can be joined.
_PART_BYTES = 48 << 10
_SMALL_BYTES = 64 << 10
_RANGE = re.compile(r"bytes=(\d{0,12})-(\d{0,12})", re.ASCII)


def picture_facts(picture: Picture) -> dict[str, object]:
    """Return what answers say of a picture beside its bytes."""
    return {
        "index": picture.index,
        "seed": picture.seed,
        "width": picture.width,
        "height": picture.height,
        "digest": picture.digest,
    }


def base64_text(data: bytes) -> str:
    """Return the base64 text of bytes."""
    return binascii.b2a_base64(data, newline=False).decode()


def base64_parts(data: bytes) -> Iterator[bytes]:
    """Yield the base64 text of bytes in parts, so that a large picture does not take its size several times."""
    view = memoryview(data)
    for start in range(0, len(data), _PART_BYTES):
        yield binascii.b2a_base64(view[start : start + _PART_BYTES], newline=False)


def with_base64(text: bytes, marks: Sequence[str], pictures: Sequence[bytes]) -> Iterator[bytes]:
    """Yield a text in which each mark, in order, is replaced by the base64 text of a picture."""
    for mark, picture in zip(marks, pictures, strict=True):
        before, _, text = text.partition(mark.encode())
        yield before
        yield from base64_parts(picture)
    yield text


def new_marks(count: int) -> list[str]:
    """Return texts that occur nowhere else, to stand for pictures in JSON."""
    return [secrets.token_hex(16) for _ in range(count)]


def base64_response(text: bytes, marks: Sequence[str], pictures: Sequence[bytes]) -> Response:
    """Return an answer of JSON in which each mark is replaced by its picture in base64."""
    length = len(text) - sum(map(len, marks)) + sum((len(picture) + 2) // 3 * 4 for picture in pictures)
    parts = with_base64(text, marks, pictures)
    if length <= _SMALL_BYTES:  # much cheaper than a stream
        return Response(b"".join(parts), media_type="application/json")
    headers = {"content-length": str(length)}
    return StreamingResponse(_iterate(parts), headers=headers, media_type="application/json")


async def _iterate(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def file_response(request: Request, job: AsyncJob, index: int) -> Response:
    """Return a picture of a job as a file, or the range of it that the request asks for.

    A picture that the client has is not fetched.
    """
    headers = {
        "etag": f'"{hashlib.sha256(f"{job.id}/{index}".encode()).hexdigest()}"',
        "cache-control": "private, max-age=3600, immutable",
        "accept-ranges": "bytes",
        "x-content-type-options": "nosniff",
    }
    is_known = _is_known(request.headers.get("if-none-match", ""), headers["etag"])
    if is_known and index < (await job.status()).image_count:
        return Response(None, 304, headers)
    picture = await job.image(index)
    data, status = memoryview(picture.data), 200
    wanted = request.headers.get("if-range", headers["etag"]) == headers["etag"]
    if wanted and (bounds := _bounds(request.headers.get("range", ""), len(data))):
        begin, end = bounds
        if begin >= end:
            return Response(None, 416, {**headers, "content-range": f"bytes */{len(data)}"})
        headers["content-range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        data, status = data[begin:end], 206
    headers["content-length"] = str(len(data))
    parts = (bytes(data[start : start + _PART_BYTES]) for start in range(0, len(data), _PART_BYTES))
    return StreamingResponse(_iterate(parts), status, headers, media_type=f"image/{picture.format}")


def _is_known(header: str, etag: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return etag in tags or tags == ["*"]


def _bounds(header: str, size: int) -> tuple[int, int] | None:
    """Return the begin and the end of a range; None if the header is invalid, asks for several ranges or is absent."""
    match = _RANGE.fullmatch(header)
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        return max(0, size - int(match[2])), size
    first, last = int(match[1]), int(match[2] or size)
    return (first, min(last + 1, size)) if first <= last or not match[2] else None


class UrlSeal:
    """Seals what the URL of a picture needs: the job, the index, and the key of the caller, who may see it.

    The gateway decides whether that caller may see the picture, each time that it is fetched. Nobody else can read or
    make such URLs.

    Args:
        secret: Secret that all instances share; None for a random one.
        ttl_s: Seconds for which a URL is valid.
    """

    def __init__(self, secret: bytes | None, *, ttl_s: float) -> None:
        self._secret = secret or secrets.token_bytes(32)
        self._ttl_s = ttl_s

    def seal(self, picture: Picture, key: str) -> str:
        """Return the last part of a picture's URL."""
        content = json.dumps([picture.job_id, picture.index, key]).encode()
        return self._fernet().encrypt(content).decode()

    def open(self, token: str) -> tuple[str, int, str]:
        """Return the job, the index and the key in a URL. Raise ImageNotFound if it has expired or was forged."""
        from cryptography.fernet import InvalidToken

        try:
            job_id, index, key = json.loads(self._fernet().decrypt(token.encode(), ttl=int(self._ttl_s)))
        except (InvalidToken, ValueError):
            raise ImageNotFound("the URL of the image has expired, or is not valid") from None
        return job_id, index, key

    def _fernet(self) -> Fernet:
        # Imported only here: it takes megabytes, and most clients ask for no URLs.
        from cryptography.fernet import Fernet

        return Fernet(base64.urlsafe_b64encode(hashlib.sha256(self._secret).digest()))


def authorization_of(key: str) -> str:
    """Return the header `authorization` of a key; "" for no key."""
    return bearer(key)[1] if key else ""
