"""The records of a store in one SQLite file: numbered records, each with parts that have files.

Calls must come from one thread at a time. They wait for the disk and raise StorageUnavailable, or DataLoss for a
damaged file.
"""

from __future__ import annotations

import functools
import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from bottega.blobstore.tables import RecordTable, StoredRow, Values
from bottega.storage import SqliteFile, SqliteSchema

ResultT = TypeVar("ResultT")

SharedValues = Callable[[str], bytes | None]
"""Returns a shared value by digest; None if it is missing or damaged."""

# Shared values that are cached while reading; records of one model share most of them.
_SHARED_AT_HAND = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSchema:
    """The content of a store's SQLite file."""

    what: str
    """Names it for people, such as "the records of templates"."""
    application_id: int
    """Value of PRAGMA application_id."""
    version: int
    remedy: str
    """Tells people what fills a new file after a damaged one."""
    records: RecordTable
    """Its key is the record's number."""
    parts: RecordTable
    """Its key begins with the number of the part's record."""
    indexes: tuple[str, ...] = ()
    """Statements that create further indexes."""
    shared: tuple[str, ...] = ()
    """Columns of the parts that hold digests of values which several parts share. Each value is stored once."""

    @property
    def sqlite(self) -> SqliteSchema:
        """The schema of the file."""
        tables = [self.records.statement, *self.indexes, self.parts.statement]
        if self.shared:
            tables.append("CREATE TABLE shared (digest TEXT PRIMARY KEY, data BLOB NOT NULL) STRICT, WITHOUT ROWID")
        return SqliteSchema(
            what=self.what,
            application_id=self.application_id,
            version=self.version,
            tables=tuple(tables),
            remedy=self.remedy,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """A record that was read, with its intact parts."""

    row: StoredRow
    parts: tuple[StoredRow, ...]
    shared: SharedValues


@dataclass(slots=True, kw_only=True)
class RecordChanges:
    """Changes of records that are to be written. Values are those of the tables' columns."""

    gone: set[int] = field(default_factory=set)
    """Numbers of records to delete, with their parts."""
    gone_parts: set[Values] = field(default_factory=set)
    """Keys of parts to delete."""
    uses: dict[int, Values] = field(default_factory=dict)
    """New uses of records, by number."""
    part_uses: dict[Values, Values] = field(default_factory=dict)
    """New uses of parts, by key."""

    def __bool__(self) -> bool:
        return bool(self.gone or self.gone_parts or self.uses or self.part_uses)

    def add(self, other: RecordChanges) -> None:
        """Merge later changes into these."""
        self.gone |= other.gone
        self.gone_parts |= other.gone_parts
        self.uses.update(other.uses)
        self.part_uses.update(other.part_uses)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """Rows to add or replace, each given by the values of its fixed and of its changing columns."""

    records: tuple[tuple[Values, Values], ...] = ()
    parts: tuple[tuple[Values, Values], ...] = ()
    shared: Mapping[str, bytes] = field(default_factory=dict)
    """Shared values of the parts, by digest."""

    def __bool__(self) -> bool:
        return bool(self.records or self.parts)


class BlobRecords:
    """The SQLite file of a store's records. Call `open` before anything else."""

    def __init__(self, path: Path, schema: RecordSchema) -> None:
        self._schema = schema
        self._file = SqliteFile(path, schema.sqlite)
        self._path = path
        self._inode = 0

    @property
    def shares_values(self) -> bool:
        """Whether parts have shared values."""
        return bool(self._schema.shared)

    def open(self) -> bool:
        """Create or open the file, and return whether it is the same file as before. A damaged one is set aside.

        Open it again after the disk failed: a file that was opened on a read-only disk stays read-only. Raises
        ConfigError if the file is another program's.
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

    def read(self, take: Callable[[StoredRecord], None], *, suffix: str = "") -> RecordChanges:
        """Pass each intact record to `take`, and return the changes that delete the damaged ones.

        Args:
            suffix: The rest of the SELECT statement of the records, such as "ORDER BY key".
        """
        return self._file.transact(lambda connection: self._read(connection, take, suffix))

    def transact(self, operation: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """Return the result of `operation`, after its transaction is on the disk."""
        return self._file.transact(operation)

    def write(self, changes: RecordChanges, new: NewRows) -> None:
        """Write everything to the disk, or nothing."""
        self._file.transact(lambda connection: self._write(connection, changes, new))

    def drop_strays(self) -> None:
        """Delete parts without a record, which damaged rows leave behind, and shared values without a part."""
        records, parts = self._schema.records, self._schema.parts
        number = records.fixed[0].split()[0]
        statements = [f"DELETE FROM {parts.name} WHERE {number} NOT IN (SELECT {number} FROM {records.name})"]
        if self._schema.shared:
            used = " UNION ".join(f"SELECT {column} FROM {parts.name}" for column in self._schema.shared)
            statements.append(f"DELETE FROM shared WHERE digest NOT IN ({used})")

        def drop(connection: sqlite3.Connection) -> None:
            for statement in statements:
                connection.execute(statement)

        self._file.transact(drop)

    def _read(self, connection: sqlite3.Connection, take: Callable[[StoredRecord], None], suffix: str) -> RecordChanges:
        damaged = RecordChanges()
        shared = _shared_values(connection)
        number = self._schema.parts.fixed[0].split()[0]
        for row in self._schema.records.read(connection, suffix):
            if not row.intact:
                damaged.gone.add(row.key[0])
                continue
            parts = list(self._schema.parts.read(connection, f"WHERE {number} = ?", row.key))
            damaged.gone_parts |= {part.key for part in parts if not part.intact}
            take(StoredRecord(row=row, parts=tuple(part for part in parts if part.intact), shared=shared))
        return damaged

    def _write(self, connection: sqlite3.Connection, changes: RecordChanges, new: NewRows) -> None:
        records, parts = self._schema.records, self._schema.parts
        gone = [(number,) for number in changes.gone]
        parts.delete(connection, changes.gone_parts)
        connection.executemany(f"DELETE FROM {parts.name} WHERE {parts.fixed[0].split()[0]} = ?", gone)
        records.delete(connection, gone)
        parts.change(connection, changes.part_uses.items())
        records.change(connection, (((number,), use) for number, use in changes.uses.items()))
        records.add(connection, new.records)
        if new.shared:  # existing values are replaced as well, in case they are damaged
            connection.executemany("REPLACE INTO shared VALUES (?, ?)", new.shared.items())
        parts.add(connection, new.parts)

    def _found_inode(self) -> int:
        try:
            return self._path.stat().st_ino
        except OSError:
            return 0


def shared_digest(value: bytes) -> str:
    """Return the digest of a shared value."""
    return hashlib.sha256(value).hexdigest()


def shared_by_digest(values: Iterable[bytes]) -> dict[str, bytes]:
    """Return shared values by digest."""
    return {shared_digest(value): value for value in set(values)}


def _shared_values(connection: sqlite3.Connection) -> SharedValues:
    @functools.lru_cache(maxsize=_SHARED_AT_HAND)
    def shared(digest: str) -> bytes | None:
        row = connection.execute("SELECT data FROM shared WHERE digest = ?", (digest,)).fetchone()
        return row[0] if row is not None and shared_digest(row[0]) == digest else None

    return shared
