"""Log files of services: bounded files that are written line by line, their last lines, and lines as they come."""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import logging.handlers
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Self

from bottega.client.instance import StateFolderUnusable

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


_LOOK_S = 0.2


def services_with_logs(folder: Path) -> list[str]:
    """Names of the services that have a log in `folder`. Raises StateFolderUnusable where nobody may look."""
    try:
        return sorted(path.stem for path in folder.iterdir() if path.suffix == ".log")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StateFolderUnusable(f"the logs in {folder} cannot be read: {error.strerror}") from None


def last_lines(folder: Path, services: list[str], count: int) -> list[tuple[str, str]]:
    """The last `count` lines of these services together, each with whose it is.

    By time; a line without one, such as a traceback's, stays where it stands in its log.
    """
    timed = [[(moment, service, line) for moment, line in _timed(folder, service, count)] for service in services]
    merged = heapq.merge(*timed, key=lambda item: item[0])
    return [(service, line) for _, service, line in deque(merged, maxlen=count)]


class LogFollower:
    """What is appended to one log from now on, also after it was rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._rest = b""

    def new_lines(self) -> list[str]:
        """The whole lines that came since the last call."""
        data = self._file.read()
        if not data and self._rotated():
            self._file.close()
            self._file = self._path.open("rb")
            data = self._file.read()
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _rotated(self) -> bool:
        try:
            return self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False


def follow(folder: Path, services: list[str]) -> Iterator[tuple[str, str]]:
    """Lines as they come, each with whose it is, for ever; close it."""
    followers = {service: LogFollower(folder / f"{service}.log") for service in services}
    try:
        while True:
            for service, follower in followers.items():
                yield from ((service, line) for line in follower.new_lines())
            time.sleep(_LOOK_S)
    finally:
        for follower in followers.values():
            follower.close()


def _timed(folder: Path, service: str, count: int) -> list[tuple[str, str]]:
    lines: deque[str] = deque(maxlen=count)
    for path in (folder / f"{service}.log.1", folder / f"{service}.log"):
        if path.exists():
            with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
                lines.extend(line.rstrip("\n") for line in file)
    moments = [str(fields_of(line).get("time", "")) for line in lines]
    moment = next((found for found in moments if found), "")
    timed = []
    for found, line in zip(moments, lines, strict=True):
        moment = found or moment
        timed.append((moment, line))
    return timed
