"""A table of records in SQLite whose rows carry a checksum, so that damaged rows are noticed and never served."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bottega.storage.checksums import Value, checksum

Values = tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """A row of a table."""

    key: tuple[Any, ...]
    """Values of the key's columns."""
    values: tuple[Any, ...]
    """Values of all fixed columns, the key's first."""
    use: tuple[Any, ...]
    """Values of the changing columns, which may be damaged even if the row is intact."""
    intact: bool
    """Whether the fixed columns have their checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTable:
    """A table: fixed columns, their checksum, and columns that change while a row exists.

    The checksum leaves the changing columns out. They count uses: damage to them only makes something stay too long or
    go too early.
    """

    name: str
    fixed: tuple[str, ...]
    """Columns with their types, such as "number INTEGER". The first ones are the key."""
    key_columns: int = 1
    """Number of columns of the primary key."""
    changing: tuple[str, ...] = ()

    @property
    def statement(self) -> str:
        """The statement that creates the table."""
        columns = ", ".join(f"{column} NOT NULL" for column in (*self.fixed, "checksum INTEGER", *self.changing))
        key = ", ".join(_names(self.fixed[: self.key_columns]))
        # A single integer as the key is the row's own id; other keys save an index without one.
        options = "STRICT" if self.key_columns == 1 and self.fixed[0].endswith(" INTEGER") else "STRICT, WITHOUT ROWID"
        return f"CREATE TABLE {self.name} ({columns}, PRIMARY KEY ({key})) {options}"

    def read(
        self, connection: sqlite3.Connection, suffix: str = "", values: Sequence[Value] = ()
    ) -> Iterator[StoredRow]:
        """Yield rows.

        Args:
            suffix: The rest of the SELECT statement, such as "WHERE number = ?".
            values: Values of its parameters.
        """
        width = len(self.fixed)
        for row in connection.execute(f"{_select(self)} {suffix}", values):
            fixed, expected, use = row[:width], row[width], row[width + 1 :]
            yield StoredRow(key=fixed[: self.key_columns], values=fixed, use=use, intact=checksum(fixed) == expected)

    def add(self, connection: sqlite3.Connection, rows: Iterable[tuple[Values, Values]]) -> None:
        """Add or replace rows, each given by the values of its fixed and of its changing columns."""
        places = ", ".join("?" * (len(self.fixed) + 1 + len(self.changing)))
        connection.executemany(
            f"REPLACE INTO {self.name} VALUES ({places})", ((*fixed, checksum(fixed), *use) for fixed, use in rows)
        )

    def change(self, connection: sqlite3.Connection, uses: Iterable[tuple[Values, Values]]) -> None:
        """Set the changing columns of rows, each given by its key and their values."""
        if self.changing:
            columns = ", ".join(f"{name} = ?" for name in _names(self.changing))
            statement = f"UPDATE {self.name} SET {columns} WHERE {self._where}"
            connection.executemany(statement, ((*use, *key) for key, use in uses))

    def delete(self, connection: sqlite3.Connection, keys: Iterable[Values]) -> None:
        """Delete the rows of these keys that exist."""
        connection.executemany(f"DELETE FROM {self.name} WHERE {self._where}", keys)

    @property
    def _where(self) -> str:
        return " AND ".join(f"{name} = ?" for name in _names(self.fixed[: self.key_columns]))


@functools.lru_cache(maxsize=64)
def _select(table: RecordTable) -> str:
    columns = ", ".join((*_names(table.fixed), "checksum", *_names(table.changing)))
    return f"SELECT {columns} FROM {table.name}"


def _names(columns: Sequence[str]) -> list[str]:
    return [column.split()[0] for column in columns]
