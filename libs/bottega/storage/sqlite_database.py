"""One SQLite file of ours: made, opened or kept aside where it is damaged, and every transaction on it in one thread at
a time.

A file that is damaged gets another name and stays; a new one takes its place, so that the service starts. Damage to a
single row is seen by the checksum that each table's owner keeps in its rows.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from bottega.errors import DataLoss
from bottega.process import open_files
from bottega.storage import os_errors, sqlite_files
from bottega.storage.thread import StorageThread

ResultT = TypeVar("ResultT")

# A disk that damages one file after the other needs a person, not more of them.
_MOST_ASIDE = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteSchema:
    """What is in a file. what: it is, for people, such as "the catalogue of LoRAs". tables: statements that make them.

    remedy: of a damaged file whose place a new one has taken, for people: what fills that. journal: with DELETE the
    file can be read where nothing can be written, with WAL many commits cost less.
    """

    what: str
    application_id: int
    version: int
    tables: tuple[str, ...]
    remedy: str
    journal: Literal["WAL", "DELETE"] = "WAL"


class SqliteFile:
    """The file in the caller's own thread; calls come one at a time. Open it before anything else.

    Every method may raise StorageUnavailable, or DataLoss for a damaged file.
    """

    def __init__(self, path: Path, schema: SqliteSchema) -> None:
        self.path = path
        self._schema = schema
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Makes the file where there is none; a damaged one is kept aside.

        Raises ConfigError for somebody else's or another version's, DataLoss where too many have been damaged.
        """
        with self._typed_errors(), os_errors.translated():
            self._connection = open_file(self.path, self._schema)

    def close(self) -> None:
        """Lets the file go. Harmless where it is not open."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def transact(self, operation: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """What `operation` returns, done in a transaction that is on the disk by then, or undone when it raises."""
        if self._connection is None:
            raise os_errors.unavailable(f"{self._schema.what} is not open", cause=os_errors.NOT_OPEN)
        with self._typed_errors(), self._connection:
            self._connection.execute("BEGIN")
            return operation(self._connection)

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._typed(error) from error

    def _typed(self, error: sqlite3.Error) -> Exception:
        what = self._schema.what
        if sqlite_files.says_damage(error):
            return DataLoss(
                f"{what} is damaged; start the service again: it keeps the damaged file aside and makes a new one: "
                f"{self._schema.remedy}"
            )
        if getattr(error, "sqlite_errorcode", None) is None:
            return error
        if why := open_files.exhausted():
            return open_files.too_many(why)
        return os_errors.unavailable(f"{what} cannot be read or written now", cause=error.sqlite_errorname)


class SqliteDatabase:
    """The file for an event loop, in a thread of its own. The same methods, awaited."""

    def __init__(self, path: Path, schema: SqliteSchema) -> None:
        self.path = path
        self._file = SqliteFile(path, schema)
        self._thread = StorageThread(path.stem)

    async def open(self) -> None:
        """As SqliteFile does."""
        await self._thread.run(self._file.open)

    async def close(self) -> None:
        """Ends after what was begun."""
        await self._thread.close()
        self._file.close()

    async def transact(self, operation: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """As SqliteFile does."""
        return await self._thread.run(lambda: self._file.transact(operation))


def open_file(path: Path, schema: SqliteSchema) -> sqlite3.Connection:
    """A connection whose commits are on the disk when they return, to the file or to a new one in its place.

    Raises as SqliteFile.open does, and OSError, sqlite3.Error.
    """
    sqlite_files.create_file(path)
    try:
        return _opened(path, schema)
    except sqlite3.Error as error:
        if not sqlite_files.says_damage(error):
            raise
    _keep_aside(path, schema)
    sqlite_files.create_file(path)
    return _opened(path, schema)


def _opened(path: Path, schema: SqliteSchema) -> sqlite3.Connection:
    connection = sqlite_files.connect(path)
    try:
        is_made = sqlite_files.has_tables(
            connection, path, application_id=schema.application_id, version=schema.version, what=schema.what
        )
        if not sqlite_files.is_whole(connection) or (is_made and not _has_tables(connection, schema)):
            raise _damage()
        for pragma in (f"journal_mode = {schema.journal}", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")
        if not is_made:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                _make_tables(connection, schema)
    except BaseException:
        connection.close()
        raise
    return connection


def _make_tables(connection: sqlite3.Connection, schema: SqliteSchema) -> None:
    """Within a transaction."""
    for statement in schema.tables:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {schema.application_id}")
    connection.execute(f"PRAGMA user_version = {schema.version}")


def _has_tables(connection: sqlite3.Connection, schema: SqliteSchema) -> bool:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
        for statement in schema.tables:
            made.execute(statement)
        return sqlite_files.schema_of(made) == sqlite_files.schema_of(connection)


def _keep_aside(path: Path, schema: SqliteSchema) -> None:
    others = sorted(path.parent.glob(f"{path.stem}.damaged-*{path.suffix}"))
    if len(others) >= _MOST_ASIDE:
        raise DataLoss(
            f"{path} is damaged, and {len(others)} others that were are beside it, such as {others[-1].name}: look "
            "after the disk, move them away, and start again; no other file is touched meanwhile"
        )
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = path.with_name(f"{path.stem}.damaged-{stamp}-{len(others)}{path.suffix}")
    sqlite_files.put_aside(path, aside)
    what = f"{schema.what} is damaged; it is kept aside, and a new one is made"
    _log.error(f"{what}: {schema.remedy}", extra={"kept": str(aside)})


def _damage() -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError("the file is not whole")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
