"""The tables of a ControlNet server's SQLite file: added ControlNets, and measured profiles.

Each row has a checksum, so that damaged rows are noticed and skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from bottega.storage import SqliteSchema
from bottega.storage.checksums import Value, checksum

_log = logging.getLogger(__name__)

SCHEMA = SqliteSchema(
    what="the catalogue of ControlNets",
    application_id=0x4274436E,  # "BtCn"
    version=1,
    tables=(
        """
        CREATE TABLE controlnets (
            name TEXT PRIMARY KEY,
            folder TEXT NOT NULL,
            checksum INTEGER NOT NULL
        ) STRICT, WITHOUT ROWID
        """,
        """
        CREATE TABLE profiles (
            number INTEGER PRIMARY KEY,
            digest TEXT NOT NULL,
            profile BLOB NOT NULL,
            checksum INTEGER NOT NULL
        ) STRICT
        """,
        "CREATE INDEX profiles_digest ON profiles (digest)",
    ),
    remedy="bottega controlnets add adds ControlNets again, and bottega controlnets profile measures them",
)


def with_checksum(*values: Value) -> tuple[Value, ...]:
    """Return a row to be written."""
    return (*values, checksum(values))


def sound_rows(table: str, rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield the undamaged rows without their checksums. Damaged rows are logged."""
    for *values, written in rows:
        if checksum(values) == written:
            yield tuple(values)
        else:
            facts = {"table": table, "row": str(values[0])}
            _log.error("a row of the catalogue of ControlNets is damaged; it is left out", extra=facts)
