"""The records of a store in one SQLite file: numbered records, each with parts that have files.

Rows have a checksum, so that damaged rows are detected and never served.

Calls must come from one thread at a time. They wait for the disk and raise StorageUnavailable, or DataLoss for a
damaged file.
"""

from __future__ import annotations

import functools
import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bottega.storage import SqliteFile, SqliteSchema
from bottega.storage.sqlite_files import Value, checksum

Values = tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """A row of a table."""

    key: tuple[Any, ...]
    """Values of the key's columns."""
    values: tuple[Any, ...]
    """Values of all fixed columns, those of the key first."""
    use: tuple[Any, ...]
    """Values of the changing columns. They may be damaged even if the row is intact, because no checksum covers
    them."""
    intact: bool
    """Whether the fixed columns match their checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTable:
    """A table: fixed columns, their checksum, and columns that change while a row exists.

    The checksum does not cover the changing columns. They count uses, and damage to them only makes something be
    evicted too late or too early.
    """

    name: str
    fixed: tuple[str, ...]
    """Columns with their types, such as "number INTEGER". The first ones form the key."""
    key_columns: int = 1
    """Number of columns of the primary key."""
    changing: tuple[str, ...] = ()

    @property
    def statement(self) -> str:
        """The SQL statement that creates the table."""
        columns = ", ".join(f"{column} NOT NULL" for column in (*self.fixed, "checksum INTEGER", *self.changing))
        key = ", ".join(_names(self.fixed[: self.key_columns]))
        # A single integer as the key is the row's own id; other keys save an index without one.
        options = "STRICT" if self.key_columns == 1 and self.fixed[0].endswith(" INTEGER") else "STRICT, WITHOUT ROWID"
        return f"CREATE TABLE {self.name} ({columns}, PRIMARY KEY ({key})) {options}"

    def read(
        self, connection: sqlite3.Connection, suffix: str = "", values: Sequence[Value] = ()
    ) -> Iterator[StoredRow]:
        """Return the rows.

        Args:
            suffix: The rest of the SELECT statement, such as "WHERE number = ?".
            values: Values of its parameters.
        """
        return map(self.stored, connection.execute(f"{_select(self)} {suffix}", values))

    @property
    def columns(self) -> list[str]:
        """Names of the fixed columns, the checksum, and the changing columns."""
        return [*_names(self.fixed), "checksum", *_names(self.changing)]

    def stored(self, row: tuple[Any, ...]) -> StoredRow:
        """Return a row from the values of its `columns`."""
        width = len(self.fixed)
        fixed, expected, use = row[:width], row[width], row[width + 1 :]
        return StoredRow(key=fixed[: self.key_columns], values=fixed, use=use, intact=checksum(fixed) == expected)

    def values(self, row: tuple[Values, Values]) -> Values:
        """Return the values of the `columns` of a new row, given by its fixed and its changing columns."""
        fixed, use = row
        return *fixed, checksum(fixed), *use

    def add(self, connection: sqlite3.Connection, rows: Iterable[tuple[Values, Values]]) -> None:
        """Add or replace rows. Each has the values of its fixed columns and those of its changing columns."""
        places = ", ".join("?" * (len(self.fixed) + 1 + len(self.changing)))
        connection.executemany(f"REPLACE INTO {self.name} VALUES ({places})", map(self.values, rows))

    def change(self, connection: sqlite3.Connection, uses: Iterable[tuple[Values, Values]]) -> None:
        """Set the changing columns of rows. Each row is given by its key and the new values."""
        if self.changing:
            columns = ", ".join(f"{name} = ?" for name in _names(self.changing))
            statement = f"UPDATE {self.name} SET {columns} WHERE {self._where}"
            connection.executemany(statement, ((*use, *key) for key, use in uses))

    def delete(self, connection: sqlite3.Connection, keys: Iterable[Values]) -> None:
        """Delete the rows with these keys, as far as they exist."""
        connection.executemany(f"DELETE FROM {self.name} WHERE {self._where}", keys)

    @property
    def _where(self) -> str:
        return " AND ".join(f"{name} = ?" for name in _names(self.fixed[: self.key_columns]))


@functools.lru_cache(maxsize=64)
def _select(table: RecordTable) -> str:
    return f"SELECT {', '.join(table.columns)} FROM {table.name}"


def _names(columns: Sequence[str]) -> list[str]:
    return [column.split()[0] for column in columns]


ResultT = TypeVar("ResultT")

SharedValues = Callable[[str], bytes | None]
"""Returns a shared value by its digest; None if it is missing or damaged."""

# Shared values that are cached while reading; records of one model share most of them.
_SHARED_AT_HAND = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSchema:
    """The tables of a store's SQLite file."""

    what: str
    """Name of the file in error messages, such as "the records of pictures"."""
    application_id: int
    """Value of PRAGMA application_id."""
    version: int
    remedy: str
    """Advice in error messages: how to restore the content of a damaged file."""
    records: RecordTable
    """The table of records. Its key is the record's number."""
    parts: RecordTable
    """The table of parts. Its key begins with the number of the part's record."""
    indexes: tuple[str, ...] = ()
    """SQL statements that create further indexes."""
    shared: tuple[str, ...] = ()
    """Columns of the parts with digests of values that several parts share. Each such value is stored once."""

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
    """A record that was read, with those of its parts that are intact."""

    row: StoredRow
    parts: tuple[StoredRow, ...]
    shared: SharedValues


@dataclass(slots=True, kw_only=True)
class RecordChanges:
    """Changes of records that remain to be written. Values are those of the tables' columns."""

    gone: set[int] = field(default_factory=set)
    """Numbers of records to delete, with their parts."""
    gone_parts: set[Values] = field(default_factory=set)
    """Keys of parts to delete."""
    uses: dict[int, Values] = field(default_factory=dict)
    """New values of the changing columns of records, by number."""
    part_uses: dict[Values, Values] = field(default_factory=dict)
    """New values of the changing columns of parts, by key."""

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
    """Rows to add or replace. Each has the values of its fixed columns and those of its changing columns."""

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
        """Whether parts have columns with digests of shared values."""
        return bool(self._schema.shared)

    def open(self) -> bool:
        """Create or open the file. Return whether it is the same file as before. A damaged one is renamed and replaced.

        After the disk failed, open it again: a file that was opened on a read-only disk stays read-only. Raises
        ConfigError if the file belongs to another program.
        """
        self._file.close()
        self._file.open()
        before, self._inode = self._inode, self._found_inode()
        return self._inode == before

    def close(self) -> None:
        self._file.close()

    @property
    def in_place(self) -> bool:
        """Whether the open file is still the one at its path."""
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
        """Write all of this to the disk in one transaction."""
        self._file.transact(lambda connection: self._write(connection, changes, new))

    def drop_strays(self) -> None:
        """Delete parts without a record, which damaged rows leave behind, and shared values that no part uses."""
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
    """Return the SHA-256 of a value in hex: the key under which records that contain the same value share one copy."""
    return hashlib.sha256(value).hexdigest()


def shared_by_digest(values: Iterable[bytes]) -> dict[str, bytes]:
    """Return the values without duplicates, by their `shared_digest`."""
    return {shared_digest(value): value for value in set(values)}


def _shared_values(connection: sqlite3.Connection) -> SharedValues:
    @functools.lru_cache(maxsize=_SHARED_AT_HAND)
    def shared(digest: str) -> bytes | None:
        row = connection.execute("SELECT data FROM shared WHERE digest = ?", (digest,)).fetchone()
        return row[0] if row is not None and shared_digest(row[0]) == digest else None

    return shared
