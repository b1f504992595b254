"""Functions that create, open, check, copy and rename SQLite files, and checksums of their rows."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import urllib.parse
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from bottega.errors import ConfigError
from bottega.storage import folders

# Another process's commit takes milliseconds, and a checkpoint some tens of them.
_BUSY_TIMEOUT_S = 5.0
# A service should be ready again within 3 s; checking 50,000 rows takes .3 s.
_CHECK_S = 1.0
# Primary result codes, https://sqlite.org/rescode.html; extended ones carry them in their low byte.
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# Errors of a valid statement if the text of the schema in the file was changed.
_CHANGED_SCHEMA = ("no such column", "no such table")

Value = str | bytes | int | float | None
"""The value of a SQLite column."""


def checksum(values: Sequence[Value]) -> int:
    """Return the CRC-32 of values and their types. It detects accidents, not manipulation."""
    found = 0
    for value in values:
        raw = value if isinstance(value, bytes) else repr(value).encode()
        found = zlib.crc32(raw, zlib.crc32(b"%d" % len(raw), found))
    return found


def create_file(path: Path) -> None:
    """Create an empty file, private to the user, if there is none. Raise OSError if that fails."""
    if path.exists():
        return
    folders.make_own(path.parent)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def connect(path: Path | str, *pragmas: str) -> sqlite3.Connection:
    """Return a connection for one thread at a time, with explicit transactions. Raise sqlite3.Error if that fails.

    Args:
        path: A path, or a URI as a string.
    """
    connection = sqlite3.connect(
        path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=isinstance(path, str)
    )
    # Damaged text must reach the checksum that notices it.
    connection.text_factory = lambda raw: str(raw, "utf-8", "replace")
    try:
        for pragma in ("PRAGMA trusted_schema = OFF", "PRAGMA cell_size_check = ON", *pragmas):
            connection.execute(pragma)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_alone(path: Path, *pragmas: str) -> sqlite3.Connection:
    """Return a connection to an existing file that only this process uses. Otherwise the same as `connect`.

    Connections of this process share the index of the write-ahead log in its memory. Otherwise SQLite would map a file
    beside the database, and a process that reads a mapped file which another process has truncated is killed by SIGBUS.
    """
    return connect(f"file:{urllib.parse.quote(str(path))}?mode=rw&vfs=unix-excl", *pragmas)


def connect_as_left(path: Path) -> sqlite3.Connection:
    """Return a connection that reads a file and its log on a read-only disk, where not even a lock can be written.

    No process may write to them meanwhile. Raises sqlite3.Error.
    """
    # Only a connection that claims the file for itself reads a log without a shared index.
    pragmas = ("PRAGMA locking_mode = EXCLUSIVE", "PRAGMA query_only = ON")
    return connect(f"file:{urllib.parse.quote(str(path))}?mode=ro&vfs=unix-none", *pragmas)


def connect_without_log(path: Path) -> sqlite3.Connection:
    """Return a connection that reads a file and ignores its log. Raise sqlite3.Error if that fails."""
    return connect(f"file:{urllib.parse.quote(str(path))}?immutable=1")


def has_tables(connection: sqlite3.Connection, path: Path, *, application_id: int, version: int, what: str) -> bool:
    """Return whether the file has this program's tables; False means that it is empty.

    Raises ConfigError if the file belongs to another program or version, and sqlite3.Error.

    Args:
        what: What the file is called in texts for people.
    """
    ((found,),) = connection.execute("PRAGMA application_id")
    ((written,),) = connection.execute("PRAGMA user_version")
    ((tables,),) = connection.execute("SELECT count(*) FROM sqlite_schema")
    if not tables:
        return False
    if found != application_id:
        raise ConfigError(f"{path} is a database, but not {what}; configure another place")
    if written > version:
        raise ConfigError(f"{path} was written by a later version of Bottega (schema {written}); run that one")
    if written < version:
        raise ConfigError(
            f"{path} was written by an earlier version of Bottega (schema {written}; this one has {version}). Run that "
            "one, or move the file away, which loses its content"
        )
    return True


def is_whole(connection: sqlite3.Connection) -> bool:
    """Return whether a check of at most one second finds tables and indexes intact. Raise sqlite3.Error."""
    timer = threading.Timer(_CHECK_S, connection.interrupt)
    timer.start()
    try:
        found = connection.execute("PRAGMA integrity_check(1)").fetchall()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        found = [("ok",)]
    finally:
        timer.cancel()
        timer.join()
    return found == [("ok",)]


def schema_of(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return name and SQL of tables, indexes and triggers, sorted by name. Raise sqlite3.Error if that fails."""
    return connection.execute("SELECT name, sql FROM sqlite_schema ORDER BY name").fetchall()


def says_damage(error: sqlite3.Error) -> bool:
    """Return whether the error means that the content of the file is damaged."""
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_ERROR:
        return str(error).startswith(_CHANGED_SCHEMA)
    return code is not None and code & 0xFF in _DAMAGED


def copy_whole(connection: sqlite3.Connection, copy: Path, is_whole: Callable[[sqlite3.Connection], bool]) -> bool:
    """Copy everything that an open connection can read to a new file. Return False if not everything can be read.

    A connection can still read a file that was deleted or replaced. Raises OSError and sqlite3.Error if the copy cannot
    be written.
    """
    folders.make_own(copy.parent)
    copy.unlink(missing_ok=True)
    create_file(copy)
    with contextlib.closing(connect(copy)) as target:
        try:
            connection.backup(target)
            whole = is_whole(target)
        except sqlite3.Error as error:
            if not says_damage(error):
                raise
            whole = False
        # In one file, whatever the copied header says, so that it needs no log beside it.
        with contextlib.suppress(sqlite3.Error):
            target.execute("PRAGMA journal_mode = DELETE")
    if not whole:
        copy.unlink()
        return False
    descriptor = os.open(copy, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def log_of(path: Path) -> Path:
    """Return the path of the write-ahead log of a file."""
    return path.with_name(f"{path.name}-wal")


def put_aside(path: Path, aside: Path) -> None:
    """Rename a file, with its log and journal, so that its name is free. Raise OSError if that fails."""
    for end in ("-wal", "-shm", "-journal", ""):
        part = path.with_name(path.name + end)
        if part.exists():
            part.rename(aside.with_name(aside.name + end))
    folders.sync(path.parent)
