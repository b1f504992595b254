"""The catalogue's SQLite file: made, brought up to this version, looked over, and kept aside where it is damaged.

Knows no LoRA beyond its columns.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from pathlib import Path

from bottega.errors import DataLoss
from bottega.loras.catalogue_rows import COLUMNS, NEVER, to_row, unchecked
from bottega.storage import sqlite_files

_log = logging.getLogger(__name__)

# "BtLo": what PRAGMA application_id says of a file of ours.
APPLICATION_ID = 0x42744C6F
VERSION = 2
# Without checksums.
_FIRST_VERSION = 1
# A disk that damages one catalogue after the other needs a person, not more of them.
_MOST_ASIDE = 8
_TABLES = (
    """
    CREATE TABLE loras (
        name TEXT PRIMARY KEY,
        digest TEXT NOT NULL,
        base TEXT NOT NULL,
        rank INTEGER NOT NULL,
        modules INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL,
        text_bytes INTEGER NOT NULL,
        trigger_words TEXT NOT NULL,
        format TEXT NOT NULL,
        bounds TEXT NOT NULL,
        pinned INTEGER NOT NULL,
        added_s REAL NOT NULL,
        checksum INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID
    """,
    "CREATE INDEX loras_digest ON loras (digest)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)
INSERT = f"INSERT INTO loras ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"


def open_file(path: Path) -> sqlite3.Connection:
    """A connection whose commits are on the disk when they return, to the file or to a new one in its place.

    A damaged file gets another name and stays. Raises ConfigError for somebody else's or another version's, DataLoss
    where too many have been damaged, OSError, sqlite3.Error.
    """
    sqlite_files.create_file(path)
    try:
        return _opened(path)
    except sqlite3.Error as error:
        if not sqlite_files.says_damage(error):
            raise
    _put_aside(path)
    sqlite_files.create_file(path)
    return _opened(path)


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite_files.connect(path)
    try:
        version = sqlite_files.version_of(
            connection,
            path,
            application_id=APPLICATION_ID,
            known=(_FIRST_VERSION, VERSION),
            what="a catalogue of LoRAs",
        )
        if not sqlite_files.is_whole(connection) or (version == VERSION and not _has_our_tables(connection)):
            raise _damage()
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            _bring_up(connection, version)
    except BaseException:
        connection.close()
        raise
    return connection


def _bring_up(connection: sqlite3.Connection, version: int) -> None:
    """Within a transaction."""
    if version == VERSION:
        return
    rows = []
    if version == _FIRST_VERSION:
        rows = connection.execute(f"SELECT {', '.join(COLUMNS[:-1])} FROM loras").fetchall()
        connection.execute("DROP TABLE loras")
    for statement in _TABLES:
        connection.execute(statement)
    for row in rows:
        try:
            connection.execute(INSERT, to_row(unchecked(row)))
        except DataLoss:  # it stays, and is told of as any other damaged row
            connection.execute(INSERT, (*row, NEVER))


def _has_our_tables(connection: sqlite3.Connection) -> bool:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
        for statement in _TABLES:
            made.execute(statement)
        return sqlite_files.schema_of(made) == sqlite_files.schema_of(connection)


def _put_aside(path: Path) -> None:
    others = sorted(path.parent.glob(f"{path.stem}.damaged-*{path.suffix}"))
    if len(others) >= _MOST_ASIDE:
        raise DataLoss(
            f"{path} is damaged, and {len(others)} others that were are beside it, such as {others[-1].name}: look "
            "after the disk, move them away, and start again; no LoRA's file is touched meanwhile"
        )
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = path.with_name(f"{path.stem}.damaged-{stamp}-{len(others)}{path.suffix}")
    sqlite_files.put_aside(path, aside)
    what = "the catalogue of LoRAs is damaged; it is kept aside, and a new one is made"
    _log.error(f"{what}: bottega loras rebuild fills it from the LoRAs' files", extra={"kept": str(aside)})


def _damage() -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError("the file is not whole")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
