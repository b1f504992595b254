"""Files that say when requests came: CSV with a column of times, as published traces and logs of services are."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from bottega.errors import ConfigError

MAX_ROWS = 1_000_000
_COLUMNS = ("at_s", "timestamp")


def read_times(path: Path) -> list[float]:
    """Seconds from the first request on, in order.

    The first line names the columns. One of them is at_s, seconds from anywhere, or timestamp, seconds or ISO 8601;
    others are not looked at. Times need not be in order.
    Raises ConfigError naming the file, the line and what is wrong with it.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            times = sorted(_times(path, file))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not CSV: {error}") from None
    if not times:
        raise ConfigError(f"{path} has no requests")
    return [each - times[0] for each in times]


def _times(path: Path, file: TextIO) -> Iterator[float]:
    rows = csv.reader(file)
    heads = [head.strip().lower() for head in next(rows, [])]
    column = next((heads.index(name) for name in _COLUMNS if name in heads), None)
    if column is None:
        raise ConfigError(f"{path} must name its columns in the first line, one of them at_s or timestamp")
    for number, row in enumerate(rows):
        if number >= MAX_ROWS:
            raise ConfigError(f"{path} has more than {MAX_ROWS:,} requests: take a part of it")
        if row:
            yield _seconds(f"{path}, line {rows.line_num}", row[column] if column < len(row) else "")


def _seconds(where: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return _seconds_of_date(where, text)
    if not abs(seconds) < 1e12:
        raise ConfigError(f"{where}: {text!r} is no number of seconds")
    return seconds


def _seconds_of_date(where: str, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(f"{where}: {text[:40]!r} is neither seconds nor a time of ISO 8601") from None
    # Without a zone all of them are in the same one: only differences count.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
