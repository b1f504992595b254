"""Log files of services: writes bounded files line by line, reads their last lines, and follows new lines."""

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

# Size of each of a service's two files: some days of a busy service, and no full disk.
LOG_BYTES = 8 * 1024 * 1024
_LONGEST_LINE = 64 * 1024


class ServiceLog:
    """A log file NAME.log, which becomes NAME.log.1 when it is full."""

    def __init__(self, folder: Path, name: str, *, size_bytes: int = LOG_BYTES) -> None:
        self._handler = logging.handlers.RotatingFileHandler(
            folder / f"{name}.log", maxBytes=size_bytes, backupCount=1, encoding="utf-8"
        )

    def write(self, line: str) -> None:
        """Append one line."""
        self._handler.emit(logging.makeLogRecord({"msg": "%s", "args": (line,)}))

    def close(self) -> None:
        self._handler.close()


class OutputPipe:
    """A pipe for the output of a process.

    asyncio's own pipe (stdout=PIPE) is not used: waiting for a process would also wait for all descendants that hold
    the pipe, so a dead service with a living child would never be restarted.
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
        """Close this process's copy of the write end, and return a reader of the other end."""
        self._writes.close()
        stream = asyncio.StreamReader()
        self._reads, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), self._reads
        )
        return stream


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield the lines of a stream until it ends. A line that is far too long is split."""
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
    """Return the fields of a JSON log line. Any other line, such as one of a traceback, becomes the event."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):  # any library may write to stderr
        fields = None
    return fields if isinstance(fields, dict) else {"event": line}


_LOOK_S = 0.2


def services_with_logs(folder: Path) -> list[str]:
    """Return the services that have a log in a folder. Raise StateFolderUnusable if it cannot be read."""
    try:
        return sorted(path.stem for path in folder.iterdir() if path.suffix == ".log")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StateFolderUnusable(f"the logs in {folder} cannot be read: {error.strerror}") from None


def last_lines(folder: Path, services: list[str], count: int) -> list[tuple[str, str]]:
    """Return the last `count` lines of all these services together, each with the service's name.

    Lines are sorted by time. A line without a time, such as one of a traceback, stays after the line before it.
    """
    timed = [[(moment, service, line) for moment, line in _timed(folder, service, count)] for service in services]
    merged = heapq.merge(*timed, key=lambda item: item[0])
    return [(service, line) for _, service, line in deque(merged, maxlen=count)]


class LogFollower:
    """A reader of the lines that are appended to a log, across rotations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._rest = b""

    def new_lines(self) -> list[str]:
        """Return the complete lines since the last call."""
        data = self._file.read()
        if not data and self._rotated():
            self._file.close()
            self._file = self._path.open("rb")
            data = self._file.read()
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def close(self) -> None:
        self._file.close()

    def _rotated(self) -> bool:
        try:
            return self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False


def follow(folder: Path, services: list[str]) -> Iterator[tuple[str, str]]:
    """Yield lines as they are appended to logs, each with the service's name. The generator never ends; close it."""
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
