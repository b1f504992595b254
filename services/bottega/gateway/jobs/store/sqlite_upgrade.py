"""Upgrade of the job store's file from version 4, in which the step of a job's LoRAs had a column of its own, and from
version 5, in which it was all that a job's attempts decided, and did not count as bytes that are kept.
"""

from __future__ import annotations

import sqlite3

from bottega import kinds
from bottega.gateway.jobs.store.sqlite_rows import COLUMNS
from bottega.storage.checksums import Value, checksum
from bottega.v1.lora_pb2 import LoraDecision
from bottega.v1.worker_pb2 import AttemptDecisions

VERSIONS = (4, 5)
# Rows that are in memory at once, each with a spec of up to 300 KiB.
_ROWS = 100
_NAMES_IN_4 = {"decisions": "loras_step", "images": "pictures"}
_DECISIONS = COLUMNS.index("decisions")


def set_old_jobs_aside(connection: sqlite3.Connection) -> None:
    """Renames the table, so that the new one can be created. Within a transaction, as is the other part."""
    parts = "SELECT type, name FROM sqlite_schema WHERE tbl_name = 'jobs' AND type <> 'table' AND sql IS NOT NULL"
    for kind, name in connection.execute(parts).fetchall():
        connection.execute(f"DROP {kind} {name}")
    connection.execute("ALTER TABLE jobs RENAME TO old_jobs")
    connection.execute("UPDATE totals SET jobs = 0, bytes = 0")  # the new table counts them again


def copy_old_jobs(connection: sqlite3.Connection, version: int) -> None:
    """Moves the rows into the new table. A damaged one stays recognizable as such."""
    columns = [_NAMES_IN_4.get(name, name) if version == 4 else name for name in COLUMNS]
    query = f"SELECT sequence, {', '.join(columns)} FROM old_jobs WHERE sequence > ? ORDER BY sequence LIMIT ?"
    insert = f"INSERT INTO jobs (sequence, {', '.join(COLUMNS)}) VALUES (?, {', '.join('?' * len(COLUMNS))})"
    after = -1
    while rows := connection.execute(query, (after, _ROWS)).fetchall():
        after = rows[-1][0]
        for sequence, *values in rows:
            connection.execute(insert, (sequence, *_with_decisions(values)))
    connection.execute("DELETE FROM holders")
    connection.execute(
        "INSERT INTO holders SELECT finished, peer, count(*), sum(kept_bytes) FROM jobs "
        "WHERE ended_steady IS NOT NULL GROUP BY finished, peer"
    )
    # No sequence is given twice, those of forgotten jobs included.
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'jobs'")
    connection.execute("INSERT INTO sqlite_sequence SELECT 'jobs', seq FROM sqlite_sequence WHERE name = 'old_jobs'")
    connection.execute("DROP TABLE old_jobs")


def _with_decisions(row: list[Value]) -> list[Value]:
    """Version 4 had the step of the LoRAs, and version 5 a message of it, which LoraDecision is still."""
    *values, seal = row
    sound = checksum(values) == seal
    old = values[_DECISIONS] if sound else None
    decision = LoraDecision(step=old).SerializeToString() if isinstance(old, int) else old or None
    assert decision is None or isinstance(decision, bytes)
    kept = {} if decision is None else {kinds.LORAS: decision}
    values[_DECISIONS] = AttemptDecisions(by_kind=kept).SerializeToString()
    return [*values, checksum(values) if sound else seal]
