"""The records of all entries in one SQLite file: parameters, embedding, latents and their use.

Files without a record are ignored, and a record without its file is a miss, so killing the process in between does no
harm. One thread at a time calls this. Its calls wait for the disk and raise StorageUnavailable, or DataLoss for a
damaged file.
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
# Entries of a key that are read at once; their embeddings take some tens of megabytes.
_PIECE = 10_000
# Parameters that are read in one statement. SQLite accepts 32,766 values in one.
_PAGE = 1000


@dataclass(slots=True, kw_only=True)
class Changes:
    """Pending changes of the records."""

    latents: set[tuple[int, int]] = field(default_factory=set)
    """Latents to delete, by entry and step."""
    entries: set[int] = field(default_factory=set)
    """Entries to delete."""
    usages: dict[tuple[int, int], Usage] = field(default_factory=dict)
    """New usages by entry and step."""
    hits: dict[int, int] = field(default_factory=dict)
    """New hits by entry."""

    def __bool__(self) -> bool:
        return bool(self.latents or self.entries or self.usages or self.hits)

    def add(self, other: Changes) -> None:
        """Merge later changes into these."""
        self.latents |= other.latents
        self.entries |= other.entries
        self.usages.update(other.usages)
        self.hits.update(other.hits)


class CacheRecords:
    """The records of entries. Call `open` before anything else."""

    def __init__(self, path: Path) -> None:
        self._file = SqliteFile(path, SCHEMA)
        self._path = path
        self._inode = 0

    def open(self) -> bool:
        """Create or open the file, and return whether it is the same file as before. A damaged one is set aside.

        It may be opened again: a file that was opened on a read-only disk stays read-only. Raises ConfigError if the
        file is not ours.
        """
        self._file.close()
        self._file.open()
        before, self._inode = self._inode, self._found_inode()
        return self._inode == before

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def in_place(self) -> bool:
        """Whether the open file is still the one in the folder."""
        return self._inode != 0 and self._found_inode() == self._inode

    def read(self, take: Callable[[str, list[EntryRecord]], None]) -> list[int]:
        """Pass all entries to `take`, some thousands of a key at a time; return the numbers of damaged ones."""
        return self._file.transact(lambda connection: _read(connection, take))

    def drop_strays(self) -> None:
        """Delete latents without an entry, which damaged rows leave behind."""
        self._file.transact(lambda connection: connection.execute(_DROP_STRAYS))

    def write(self, added: Collection[EntryRecord], changes: Changes) -> None:
        """Write everything to the disk, or nothing."""
        self._file.transact(lambda connection: _write(connection, added, changes))

    def parameters(self, numbers: Collection[int]) -> dict[int, bytes]:
        """Return the parameters of those of these entries that exist."""
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
    """Return the undamaged latents of an entry, by step."""
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
