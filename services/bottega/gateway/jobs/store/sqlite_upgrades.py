"""From each version of the job store's file to the next. Knows no job beyond its columns."""

from __future__ import annotations

import sqlite3
import time

from bottega.gateway.jobs.store.sqlite_rows import COLUMNS
from bottega.storage.checksums import checksum
from bottega.v1 import image_pb2

# Rows that are in memory at once, each with a spec of up to 300 KiB.
_ROWS = 100

# Version 4: the peer that a job came from, and when it ended by a clock that nobody sets. finished: whether it
# completed, and so is forgotten last. holders: what each peer has of ended jobs, for who loses some when there are too
# many.
_FINISHED = f"(state = {image_pb2.JOB_STATE_COMPLETED})"
_COLUMNS = (
    "ALTER TABLE jobs ADD COLUMN peer TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE jobs ADD COLUMN ended_steady REAL",
    f"ALTER TABLE jobs ADD COLUMN finished INTEGER GENERATED ALWAYS AS {_FINISHED} VIRTUAL",
)
_INDEXES = (
    "DROP INDEX jobs_ended",
    "CREATE INDEX jobs_ended ON jobs (ended_steady, sequence) WHERE ended_steady IS NOT NULL",
    "CREATE INDEX jobs_of_peer ON jobs (finished, peer, ended_steady, sequence) WHERE ended_steady IS NOT NULL",
    """
    CREATE TABLE holders (
        finished INTEGER NOT NULL,
        peer TEXT NOT NULL,
        jobs INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        PRIMARY KEY (finished, peer)
    ) STRICT, WITHOUT ROWID
    """,
    """
    INSERT INTO holders SELECT finished, peer, count(*), sum(kept_bytes) FROM jobs
    WHERE ended_steady IS NOT NULL GROUP BY finished, peer
    """,
    "CREATE INDEX holders_jobs ON holders (finished, jobs DESC, peer)",
    "CREATE INDEX holders_bytes ON holders (finished, bytes DESC, peer)",
    """
    CREATE TRIGGER jobs_ended_of_peer AFTER UPDATE OF ended_steady ON jobs
    WHEN OLD.ended_steady IS NULL AND NEW.ended_steady IS NOT NULL BEGIN
        INSERT INTO holders VALUES (NEW.finished, NEW.peer, 1, NEW.kept_bytes)
        ON CONFLICT (finished, peer) DO UPDATE SET jobs = jobs + 1, bytes = bytes + excluded.bytes;
    END
    """,
    """
    CREATE TRIGGER jobs_forgotten_of_peer AFTER DELETE ON jobs WHEN OLD.ended_steady IS NOT NULL BEGIN
        UPDATE holders SET jobs = jobs - 1, bytes = bytes - OLD.kept_bytes
        WHERE finished = OLD.finished AND peer = OLD.peer;
        DELETE FROM holders WHERE finished = OLD.finished AND peer = OLD.peer AND jobs < 1;
    END
    """,
    "PRAGMA user_version = 4",
)


def remember_peers(connection: sqlite3.Connection) -> None:
    """From version 3 to 4. Within a transaction."""
    for statement in _COLUMNS:
        connection.execute(statement)
    _seal_anew(connection)
    for statement in _INDEXES:
        connection.execute(statement)


def _seal_anew(connection: sqlite3.Connection) -> None:
    """Fills the new columns, and has the checksums of sound rows cover them; a damaged row stays seen as one."""
    before = [name for name in COLUMNS if name not in ("peer", "ended_steady")]
    ended_at = before.index("ended_wall")
    query = f"SELECT sequence, {', '.join(before)} FROM jobs WHERE sequence > ? ORDER BY sequence LIMIT {_ROWS}"
    now, after = time.time(), -1
    while rows := connection.execute(query, (after,)).fetchall():
        after = rows[-1][0]
        for sequence, *values, seal in rows:
            ended_wall = values[ended_at]
            ended_steady = None if ended_wall is None else min(ended_wall, now)
            sealed = checksum([*values, "", ended_steady]) if checksum(values) == seal else seal
            connection.execute(
                "UPDATE jobs SET ended_steady = ?, checksum = ? WHERE sequence = ?", (ended_steady, sealed, sequence)
            )
