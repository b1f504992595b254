"""Upgrade of the job store's file from version 4, in which the step of a job's LoRAs had a column of its own."""

from __future__ import annotations

import sqlite3

from bottega.gateway.jobs.store.sqlite_rows import COLUMNS
from bottega.storage.checksums import checksum
from bottega.v1.worker_pb2 import AttemptDecisions

# Rows that are in memory at once, each with a spec of up to 300 KiB.
_ROWS = 100
_OLD_COLUMNS = tuple({"decisions": "loras_step", "images": "pictures"}.get(name, name) for name in COLUMNS)


def set_old_jobs_aside(connection: sqlite3.Connection) -> None:
    """Renames the table, so that the new one can be created. Within a transaction, as is the other part."""
    parts = "SELECT type, name FROM sqlite_schema WHERE tbl_name = 'jobs' AND type <> 'table' AND sql IS NOT NULL"
    for kind, name in connection.execute(parts).fetchall():
        connection.execute(f"DROP {kind} {name}")
    connection.execute("ALTER TABLE jobs RENAME TO old_jobs")
    connection.execute("UPDATE totals SET jobs = 0, bytes = 0")  # the new table counts them again


def take_old_jobs_over(connection: sqlite3.Connection) -> None:
    """Moves the rows into the new table. A damaged one stays recognizable as such."""
    query = f"SELECT sequence, {', '.join(_OLD_COLUMNS)} FROM old_jobs WHERE sequence > ? ORDER BY sequence LIMIT ?"
    insert = f"INSERT INTO jobs (sequence, {', '.join(COLUMNS)}) VALUES (?, {', '.join('?' * len(COLUMNS))})"
    step_at, after = COLUMNS.index("decisions"), -1
    while rows := connection.execute(query, (after, _ROWS)).fetchall():
        after = rows[-1][0]
        for sequence, *values, seal in rows:
            sound = checksum(values) == seal
            step = values[step_at] if sound else None
            values[step_at] = AttemptDecisions(loras_step=step).SerializeToString()
            connection.execute(insert, (sequence, *values, checksum(values) if sound else seal))
    # No sequence is given twice, those of forgotten jobs included.
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'jobs'")
    connection.execute("INSERT INTO sqlite_sequence SELECT 'jobs', seq FROM sqlite_sequence WHERE name = 'old_jobs'")
    connection.execute("DROP TABLE old_jobs")
