"""What a service writes, line by line, into a log of bounded size."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.handlers
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import BinaryIO, Self

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


class OutputPipe:
    """A pipe that a process writes to and we read.

    Not asyncio's own (stdout=PIPE): with that, waiting for a process also waits for every descendant that
    holds the pipe, so that a dead service with a living child would never be started again.
    """

    def __init__(self) -> None:
        read_end, self.write_end = os.pipe()
        self._reads: BinaryIO | asyncio.ReadTransport = os.fdopen(read_end, "rb", buffering=0)
        self._writes = os.fdopen(self.write_end, "wb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writes.close()
        self._reads.close()

    async def reader(self) -> asyncio.StreamReader:
        """Closes our copy of the end for writing, and reads the other."""
        self._writes.close()
        stream = asyncio.StreamReader()
        self._reads, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), self._reads
        )
        return stream


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
    except (ValueError, RecursionError):  # anybody's words may be on stderr
        fields = None
    return fields if isinstance(fields, dict) else {"event": line}
