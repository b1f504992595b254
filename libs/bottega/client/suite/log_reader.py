"""Reads the services' logs: their last lines, merged by time, and what comes after them."""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from bottega.client.instance import StateFolderUnusable
from bottega.client.suite.service_log import fields_of

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
