"""What is known of every entry, in one SQLite file: what it was recorded for, its embedding, its latents and their use.

Files without a record are none of the store's; a record without its file is a miss. So whatever kills the process
between the two does no harm. One thread at a time calls it; its calls wait for the disk and raise StorageUnavailable,
or DataLoss for a damaged file.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bottega.cache.disk.record_rows import (
    ENTRY_COLUMNS,
    LATENT_COLUMNS,
    SCHEMA,
    entry_row,
    latent_row,
    read_entry,
    read_latent,
)
from bottega.cache.latent import EntryRecord, KeptLatent
from bottega.planning.eviction import Usage
from bottega.storage import SqliteFile

_ENTRIES = f"SELECT {', '.join(ENTRY_COLUMNS)} FROM entries"
_LATENTS = f"SELECT {', '.join(LATENT_COLUMNS)} FROM latents WHERE number = ?"
_ADD_ENTRY = f"REPLACE INTO entries VALUES ({', '.join('?' * len(ENTRY_COLUMNS))})"
_ADD_LATENT = f"REPLACE INTO latents VALUES ({', '.join('?' * len(LATENT_COLUMNS))})"
_DROP_STRAYS = "DELETE FROM latents WHERE number NOT IN (SELECT number FROM entries)"
_USE = "UPDATE latents SET frequency = ?, used_at = ? WHERE number = ? AND step = ?"
_KEY = ENTRY_COLUMNS.index("key")
# Of a key's entries that are read at once: their embeddings have some tens of megabytes.
_PIECE = 10_000
# Of parameters that are asked for in one statement: SQLite takes 32,766 values in one.
_PAGE = 1000


@dataclass(slots=True, kw_only=True)
class Changes:
    """What is to become of the records. latents: by entry and step, that go. entries: that go. usages: by entry and
    step. hits: by entry."""

    latents: set[tuple[int, int]] = field(default_factory=set)
    entries: set[int] = field(default_factory=set)
    usages: dict[tuple[int, int], Usage] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.latents or self.entries or self.usages or self.hits)

    def add(self, other: Changes) -> None:
        """Becomes both; the other one is the later."""
        self.latents |= other.latents
        self.entries |= other.entries
        self.usages.update(other.usages)
        self.hits.update(other.hits)


class CacheRecords:
    """Open it before anything else."""

    def __init__(self, path: Path) -> None:
        self._file = SqliteFile(path, SCHEMA)
        self._path = path
        self._inode = 0

    def open(self) -> bool:
        """Makes the file where there is none; a damaged one is kept aside. Raises ConfigError for somebody else's.

        It may be opened again: one that was opened on a disk that could not be written stays so. Whether it is the same
        file then.
        """
        self._file.close()
        self._file.open()
        before, self._inode = self._inode, self._found_inode()
        return self._inode == before

    def close(self) -> None:
        """Lets the file go."""
        self._file.close()

    @property
    def in_place(self) -> bool:
        """Whether the file that is open is still the one in the folder."""
        return self._inode != 0 and self._found_inode() == self._inode

    def read(self, take: Callable[[str, list[EntryRecord]], None]) -> list[int]:
        """Gives all entries to `take`, some thousands of a key at a time; returns the numbers of damaged ones."""
        return self._file.transact(lambda connection: _read(connection, take))

    def drop_strays(self) -> None:
        """Deletes the latents of entries that are not there, as a damaged row leaves them behind."""
        self._file.transact(lambda connection: connection.execute(_DROP_STRAYS))

    def write(self, added: Collection[EntryRecord], changes: Changes) -> None:
        """It is on the disk when this returns, all of it or nothing."""
        self._file.transact(lambda connection: _write(connection, added, changes))

    def parameters(self, numbers: Collection[int]) -> dict[int, bytes]:
        """What was drawn, of those of these entries that are there."""
        return self._file.transact(lambda connection: dict(_parameters(connection, numbers)))

    def _found_inode(self) -> int:
        try:
            return self._path.stat().st_ino
        except OSError:
            return 0


def _read(connection: sqlite3.Connection, take: Callable[[str, list[EntryRecord]], None]) -> list[int]:
    damaged: list[int] = []
    rows = connection.execute(f"{_ENTRIES} ORDER BY key")
    for key, group in itertools.groupby(rows, key=lambda row: str(row[_KEY])):
        records = []
        for row in group:
            record = read_entry(row, _latents(connection, row[0]))
            if record is None or not record.latents:
                damaged.append(row[0])
                continue
            records.append(record)
            if len(records) == _PIECE:
                take(key, records)
                records = []
        if records:
            take(key, records)
    return damaged


def _latents(connection: sqlite3.Connection, number: int) -> dict[int, KeptLatent]:
    """By step, those whose rows are what was written."""
    found = {}
    for row in connection.execute(_LATENTS, (number,)):
        latent = read_latent(row, row[1])
        if latent is not None:
            found[row[1]] = latent
    return found


def _write(connection: sqlite3.Connection, added: Collection[EntryRecord], changes: Changes) -> None:
    connection.executemany("DELETE FROM latents WHERE number = ? AND step = ?", changes.latents)
    gone = [(number,) for number in changes.entries]
    connection.executemany("DELETE FROM latents WHERE number = ?", gone)
    connection.executemany("DELETE FROM entries WHERE number = ?", gone)
    uses = [(usage.frequency, usage.used_at, *place) for place, usage in changes.usages.items()]
    connection.executemany(_USE, uses)
    connection.executemany(
        "UPDATE entries SET hits = ? WHERE number = ?", [(hits, number) for number, hits in changes.hits.items()]
    )
    connection.executemany(_ADD_ENTRY, [entry_row(record) for record in added])
    connection.executemany(
        _ADD_LATENT,
        [latent_row(record.entry.number, step, latent) for record in added for step, latent in record.latents.items()],
    )


def _parameters(connection: sqlite3.Connection, numbers: Collection[int]) -> Iterator[tuple[int, bytes]]:
    wanted = list(numbers)
    for first in range(0, len(wanted), _PAGE):
        page = wanted[first : first + _PAGE]
        places = ", ".join("?" * len(page))
        yield from connection.execute(f"SELECT number, parameters FROM entries WHERE number IN ({places})", page)
