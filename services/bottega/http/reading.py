"""Reads the bodies of requests: within a size, a time and a total of bytes, as JSON or as a form with files."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from bottega.errors import JobCancelled, QueueFull, TooLarge, Violation
from bottega.http.bodies import BodyT, parse_json
from bottega.http.errors import FieldsRefused
from bottega.http.limits import PeerLimit
from bottega.rpc.server_config import HttpServerConfig

# Larger bodies are parsed in a thread: this much takes about a millisecond.
_PARSED_AT_ONCE_BYTES = 64 << 10
_MOST_PARTS = 200
_MOST_FILES = 20
_MOST_LISTED = 64
# Key of a request's scope with its host and the bytes of its body.
_HELD = "bottega.body"


class BodyReader:
    """Reads the bodies of all requests of a server, and bounds the bytes of those that are read or being processed."""

    def __init__(self, config: HttpServerConfig) -> None:
        self._max_bytes = config.max_body_mib << 20
        self._wait_s = config.body_wait_s
        self._held = PeerLimit(config.max_bodies_mib << 20, config.peer_share)

    async def read_json(self, request: Request, kind: type[BodyT]) -> BodyT:
        """Return a body of JSON. Raise InvalidRequest, TooLarge, QueueFull if there is no memory for it now."""
        _check_type(request, "application/json")
        data = await self._read(request)
        if len(data) <= _PARSED_AT_ONCE_BYTES:
            return parse_json(kind, data)
        return await asyncio.to_thread(parse_json, kind, data)

    async def read_form(self, request: Request) -> tuple[dict[str, object], dict[str, list[bytes]]]:
        """Return the fields of a form, nested as their names say, and its files by name. Raise as read_json does."""
        _check_type(request, "multipart/form-data")
        form = await _parse_form(request, await self._read(request), self._max_bytes)
        files: dict[str, list[bytes]] = {}
        for name, part in form.multi_items():
            if isinstance(part, UploadFile):
                files.setdefault(name.removesuffix("[]"), []).append(await part.read())
        await form.close()
        return nested([(name, part) for name, part in form.multi_items() if isinstance(part, str)]), files

    def hold(self, request: Request, size: int) -> None:
        """Count bytes that a request uses beside its body. Raise QueueFull if there is no memory for them now."""
        host, held = request.scope.get(_HELD, (host_of_request(request), 0))
        if not self._held.take(host, size):
            raise QueueFull("other requests use the memory for bodies; retry", retry_after_s=1.0)
        request.scope[_HELD] = (host, held + size)

    def release(self, scope: Scope) -> None:
        """Count the bytes of a request's body, if it has one, as free. Call it when the request has ended."""
        host, size = scope.pop(_HELD, ("", 0))
        if size:
            self._held.give(host, size)

    async def _read(self, request: Request) -> bytes:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            raise self._too_large()
        data = bytearray()
        try:
            async with asyncio.timeout(self._wait_s):
                async for chunk in request.stream():
                    if len(data) + len(chunk) > self._max_bytes:
                        raise self._too_large()
                    self.hold(request, len(chunk))
                    data += chunk
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {self._wait_s:g} s") from None
        except ClientDisconnect:
            raise JobCancelled("the client left") from None
        return bytes(data)

    def _too_large(self) -> TooLarge:
        limit = f"{self._max_bytes >> 20} MiB"
        return TooLarge(f"the body is larger than {limit}", metadata={"limit": limit})


def host_of_request(request: Request) -> str:
    """Return the IP address of a request's client."""
    return request.client.host if request.client else ""


def _check_type(request: Request, expected: str) -> None:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != expected:
        raise HTTPException(415, f"the body must be {expected}")


class _MemoryParser(MultiPartParser):
    """A parser that keeps files in memory: bodies are bounded, and input images stay off the disk."""

    spool_max_size = 1 << 40


async def _parse_form(request: Request, data: bytes, max_bytes: int) -> FormData:
    async def stream() -> AsyncIterator[bytes]:
        for start in range(0, len(data), _PARSED_AT_ONCE_BYTES):
            yield data[start : start + _PARSED_AT_ONCE_BYTES]
            await asyncio.sleep(0)

    parser = _MemoryParser(
        request.headers,
        stream(),  # type: ignore[arg-type]  # an AsyncGenerator is all that it uses
        max_files=_MOST_FILES,
        max_fields=_MOST_PARTS,
        max_part_size=max_bytes,
    )
    try:
        return await parser.parse()
    except (MultiPartException, FormParserError, UnicodeDecodeError, LookupError) as error:
        for file in parser._files_to_close_on_error:
            file.close()
        text = getattr(error, "message", "it cannot be parsed")
        rule = f"is no valid form: {text}"
        raise FieldsRefused(f"body: {rule}", violations=[Violation(field="body", description=rule)]) from None


_NAME = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")
_PART = re.compile(r"\[([^\[\]]*)\]")


def nested(fields: list[tuple[str, str]]) -> dict[str, object]:
    """Return the fields of a form as a tree: a[b]=1 is {"a": {"b": "1"}}, a[]=1 is {"a": ["1"]}.

    OpenAI's clients write nested parameters so. In a list of objects, an object ends where a name of it repeats. Raise
    InvalidRequest for names that contradict each other.
    """
    tree: dict[str, object] = {}
    for name, value in fields:
        match = _NAME.fullmatch(name)
        path = [match[1], *_PART.findall(match[2])] if match else [name]
        if len(path) > 5 or not _put(tree, path, value):
            rule = "is given twice, or once as a value and once as an object"
            raise FieldsRefused(f"{name[:200]} {rule}", violations=[Violation(field=name[:200], description=rule)])
    return tree


def _put(node: Any, path: list[str], value: str) -> bool:
    """Put a value into the tree. Return False if something else is there."""
    key, *rest = path
    if isinstance(node, list):
        if key != "" or len(node) >= _MOST_LISTED:
            return False
        if not rest:
            node.append(value)
            return True
        if node and isinstance(node[-1], Mapping) and rest[0] not in node[-1]:
            return _put(node[-1], rest, value)
        node.append({})
        return _put(node[-1], rest, value)
    if not isinstance(node, dict) or key == "":
        return False
    if not rest:
        return node.setdefault(key, value) is value
    return _put(node.setdefault(key, [] if rest[0] == "" else {}), rest, value)
