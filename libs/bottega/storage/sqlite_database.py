"""A SQLite file that is created, opened or, if it is damaged, renamed and replaced.

So the service can start in spite of damage. Damage to a single row is detected by a checksum, which the table's owner
stores in the row. Files have no write-ahead log, because SQLite would map its index into memory: a process that reads a
mapped file after another process has truncated it is killed by SIGBUS.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bottega.errors import DataLoss
from bottega.process import open_files
from bottega.storage import folders, os_errors, sqlite_files
from bottega.storage.thread import SerialThread

ResultT = TypeVar("ResultT")

# A disk that damages one file after another needs an operator, not more files.
_MOST_ASIDE = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteSchema:
    """The schema of a file."""

    what: str
    """Name of the content in messages, such as "the catalogue of LoRAs"."""
    application_id: int
    """Value of PRAGMA application_id."""
    version: int
    tables: tuple[str, ...]
    """Statements that create tables and indexes."""
    remedy: str
    """Advice in messages: how to fill the new file that replaces a damaged one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeenFile:
    """Identity and size of a file after the last transaction."""

    device: int
    inode: int
    size_bytes: int

    @classmethod
    def at(cls, path: Path) -> _SeenFile | None:
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(device=status.st_dev, inode=status.st_ino, size_bytes=status.st_size)

    def is_same(self, other: _SeenFile) -> bool:
        return (self.device, self.inode) == (other.device, other.inode)


class SqliteFile:
    """A SQLite file for one caller at a time. Call `open` before anything else.

    Every method may raise StorageUnavailable, or DataLoss for a damaged file.

    Args:
        keeps_place: Whether to restore the open file if it is deleted or replaced, and to create a new file if it is
            truncated. If False, the owner must handle both cases.
    """

    def __init__(self, path: Path, schema: SqliteSchema, *, keeps_place: bool = False) -> None:
        self.path = path
        self._schema = schema
        self._keeps_place = keeps_place
        self._connection: sqlite3.Connection | None = None
        self._seen: _SeenFile | None = None

    def open(self) -> None:
        """Open the file, or create it. A damaged file is renamed and replaced.

        Raises ConfigError if it belongs to another program or version, and DataLoss if too many damaged files remain.
        """
        with self._typed_errors(), os_errors.translated():
            self._use(open_file(self.path, self._schema))

    def close(self) -> None:
        """Close the file. Do nothing if it is not open."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def transact(self, operation: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """Return the result of `operation` after its transaction is on the disk. Roll back if it raises."""
        if self._connection is None:
            raise os_errors.unavailable(f"{self._schema.what} is not open", cause=os_errors.NOT_OPEN)
        with self._typed_errors():
            self._return_to_place()
            with self._connection as connection:
                connection.execute("BEGIN")
                result = operation(connection)
            self._return_to_place()
        return result

    def _return_to_place(self) -> None:
        """Restore the file if it was deleted or replaced, because SQLite would continue without it.

        Raises StorageUnavailable if its content is lost; then a new file has replaced it.
        """
        if not self._keeps_place or self._seen is None or self._connection is None:
            return
        with os_errors.translated():
            found = _SeenFile.at(self.path)
            in_place = found is not None and found.is_same(self._seen)
            if found is not None and in_place and found.size_bytes >= self._seen.size_bytes:
                self._seen = found
                return
            what, facts = self._schema.what, {"file": str(self.path)}
            if not in_place and self._put_back(self._connection):
                _log.warning(f"{what} was deleted or replaced; its file is restored with its full content", extra=facts)
                return
            self._begin_anew()
        text = f"{what} was truncated, and a new one is made"
        _log.error(f"{text}: {self._schema.remedy}", extra=facts)
        raise os_errors.unavailable(f"{text}: {self._schema.remedy}", cause="ESTALE")

    def _put_back(self, connection: sqlite3.Connection) -> bool:
        """Restore the file from the open connection. Return False if not everything can be read."""
        copy = self.path.with_name(f"{self.path.name}-copy")
        if not sqlite_files.copy_whole(connection, copy, lambda target: _is_whole(target, self.path, self._schema)):
            return False
        self._make_room()
        copy.rename(self.path)
        folders.sync(self.path.parent)
        self._use(_opened(self.path, self._schema))
        return True

    def _begin_anew(self) -> None:
        folders.make_own(self.path.parent)
        self._make_room()
        self._use(open_file(self.path, self._schema))

    def _make_room(self) -> None:
        """Rename another file that has this file's name, or remove it if it is empty."""
        found = _SeenFile.at(self.path)
        if found is not None and found.size_bytes:
            kept = _put_aside(self.path)
            _log.warning("another file has replaced the database; it is renamed", extra={"kept": str(kept)})
            return
        for part in (self.path.with_name(f"{self.path.name}-journal"), self.path):
            part.unlink(missing_ok=True)

    def _use(self, connection: sqlite3.Connection) -> None:
        self.close()
        self._connection, self._seen = connection, _SeenFile.at(self.path)

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
                f"{what} is damaged; restart the service, which renames the damaged file and makes a new one: "
                f"{self._schema.remedy}"
            )
        if getattr(error, "sqlite_errorcode", None) is None:
            return error
        if why := open_files.exhausted():
            return open_files.too_many(why)
        return os_errors.unavailable(f"{what} cannot be read or written now", cause=error.sqlite_errorname)


class SqliteDatabase:
    """A SqliteFile for an event loop, which runs in its own thread. It restores a file that is deleted or replaced."""

    def __init__(self, path: Path, schema: SqliteSchema) -> None:
        self.path = path
        self._file = SqliteFile(path, schema, keeps_place=True)
        self._thread = SerialThread(path.stem)

    async def open(self) -> None:
        await self._thread.run(self._file.open)

    async def close(self) -> None:
        """Finish pending transactions and close the file."""
        await self._thread.close()
        self._file.close()

    async def transact(self, operation: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """Return the result of `operation`, see SqliteFile.transact."""
        return await self._thread.run(lambda: self._file.transact(operation))


def open_file(path: Path, schema: SqliteSchema) -> sqlite3.Connection:
    """Return a connection to the file, or to a new one if it is damaged. A commit waits until its data is on the disk.

    Raises the errors of SqliteFile.open, OSError and sqlite3.Error.
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
        # A file in this mode can be read on a read-only disk.
        for pragma in ("journal_mode = DELETE", "synchronous = FULL"):
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
    """Create the tables. Call it in a transaction."""
    for statement in schema.tables:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {schema.application_id}")
    connection.execute(f"PRAGMA user_version = {schema.version}")


def _is_whole(connection: sqlite3.Connection, path: Path, schema: SqliteSchema) -> bool:
    is_made = sqlite_files.has_tables(
        connection, path, application_id=schema.application_id, version=schema.version, what=schema.what
    )
    return is_made and sqlite_files.is_whole(connection) and _has_tables(connection, schema)


def _has_tables(connection: sqlite3.Connection, schema: SqliteSchema) -> bool:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
        for statement in schema.tables:
            made.execute(statement)
        return sqlite_files.schema_of(made) == sqlite_files.schema_of(connection)


def _keep_aside(path: Path, schema: SqliteSchema) -> None:
    aside = _put_aside(path)
    what = f"{schema.what} is damaged; it is renamed, and a new one is made"
    _log.error(f"{what}: {schema.remedy}", extra={"kept": str(aside)})


def _put_aside(path: Path) -> Path:
    """Rename a damaged file and return its new path. Raise DataLoss if there are too many damaged files already."""
    others = sorted(path.parent.glob(f"{path.stem}.damaged-*{path.suffix}"))
    if len(others) >= _MOST_ASIDE:
        raise DataLoss(
            f"{path} is damaged, and beside it are already {len(others)} damaged files, such as {others[-1].name}: "
            "check the disk, move those files away, and start again; until then the damaged file is left as it is"
        )
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = path.with_name(f"{path.stem}.damaged-{stamp}-{len(others)}{path.suffix}")
    sqlite_files.put_aside(path, aside)
    return aside


def _damage() -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError("the file is not whole")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
