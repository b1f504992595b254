"""The tables of the LoRA catalogue's SQLite file."""

from __future__ import annotations

from bottega.loras.catalogue_rows import COLUMNS
from bottega.storage import SqliteSchema

# "BtLo" in ASCII: the value of PRAGMA application_id in the store's files.
APPLICATION_ID = 0x42744C6F
_VERSION = 2
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

SCHEMA = SqliteSchema(
    what="the catalogue of LoRAs",
    application_id=APPLICATION_ID,
    version=_VERSION,
    tables=_TABLES,
    remedy="bottega loras rebuild restores it from the LoRAs' files",
)
