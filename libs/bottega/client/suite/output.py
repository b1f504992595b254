"""What a service writes, line by line, into a log of bounded size. Knows the log's shape, not what runs."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.handlers
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

# Two files of this size a service: the newest days of a busy one, and no full disk.
LOG_BYTES = 8 * 1024 * 1024
_LONGEST_LINE = 64 * 1024


class ServiceLog:
    """NAME.log, which becomes NAME.log.1 when it is full."""

    def __init__(self, folder: Path, name: str, *, size_bytes: int = LOG_BYTES) -> None:
        self._handler = logging.handlers.RotatingFileHandler(
            folder / f"{name}.log", maxBytes=size_bytes, backupCount=1, encoding="utf-8"
        )

    def write(self, line: str) -> None:
        """Appends one line."""
        self._handler.emit(logging.makeLogRecord({"msg": "%s", "args": (line,)}))

    def close(self) -> None:
        """Closes the file."""
        self._handler.close()


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """The lines of a stream until it ends; one that is far too long comes in pieces."""
    rest = b""
    while data := await stream.read(_LONGEST_LINE):
        *whole, rest = (rest + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        for line in whole:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def fields_of(line: str) -> Mapping[str, object]:
    """The fields of a JSON log line; a line that is none, such as a traceback, is its own event."""
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    return fields if isinstance(fields, dict) else {"event": line}
