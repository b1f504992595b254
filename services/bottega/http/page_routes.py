"""The web page at `GET /`, and its files below `/page/`: scripts, styles and the library that it uses."""

from __future__ import annotations

import functools
import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).with_name("page")
_START = "index.html"
# No inline script or style. Pictures are shown from blobs, because an <img> cannot send an API key.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self';"
    " form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file of the page."""

    data: bytes
    media_type: str
    etag: str


async def get_page(request: Request) -> Response:
    """Return the page."""
    return _answer(request, _START)


async def get_page_file(request: Request) -> Response:
    """Return a file of the page."""
    return _answer(request, request.path_params["name"])


def is_page(path: str) -> bool:
    """Return whether a path is the page's: its files are public, and what it shows comes from the API."""
    return path == "/" or path.startswith("/page/")


def _answer(request: Request, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404)
    headers = {**_HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(None, 304, headers)
    return Response(file.data, 200, headers, media_type=file.media_type)


@functools.cache
def _files() -> Mapping[str, _File]:
    """Return the files of the page by their path below its folder. Nothing else can be asked for."""
    return {path.relative_to(_FOLDER).as_posix(): _read(path) for path in sorted(_FOLDER.rglob("*")) if path.is_file()}


def _read(path: Path) -> _File:
    data = path.read_bytes()
    kind = "text/javascript" if path.suffix == ".js" else mimetypes.guess_type(path.name)[0] or "text/plain"
    return _File(data=data, media_type=kind, etag=f'"{hashlib.sha256(data).hexdigest()[:32]}"')
