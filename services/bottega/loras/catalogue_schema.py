"""The tables of the LoRA catalogue's SQLite file, and how a file of an older version is brought up to them."""

from __future__ import annotations

import sqlite3

from bottega.errors import DataLoss
from bottega.loras.catalogue_rows import COLUMNS, NEVER, to_row, unchecked
from bottega.storage import SqliteSchema

# "BtLo": what PRAGMA application_id says of a file of ours.
APPLICATION_ID = 0x42744C6F
# The first version had no checksums.
_FIRST_VERSION, _VERSION = 1, 2
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
)
INSERT = f"INSERT INTO loras ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"


def _upgrade(connection: sqlite3.Connection) -> None:
    """From the first version."""
    rows = connection.execute(f"SELECT {', '.join(COLUMNS[:-1])} FROM loras").fetchall()
    connection.execute("DROP TABLE loras")
    for statement in _TABLES:
        connection.execute(statement)
    for row in rows:
        try:
            connection.execute(INSERT, to_row(unchecked(row)))
        except DataLoss:  # it stays, and is told of as any other damaged row
            connection.execute(INSERT, (*row, NEVER))


SCHEMA = SqliteSchema(
    what="the catalogue of LoRAs",
    application_id=APPLICATION_ID,
    version=_VERSION,
    tables=_TABLES,
    remedy="bottega loras rebuild fills it from the LoRAs' files",
    upgradable=(_FIRST_VERSION,),
    upgrade=_upgrade,
)
