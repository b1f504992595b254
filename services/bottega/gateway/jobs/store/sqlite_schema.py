"""The schema of the job store's SQLite file, how the file is opened and checked, and SQLite's errors."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from bottega.errors import BottegaError, DataLoss
from bottega.gateway.jobs.store.quotas import DAY_S
from bottega.process import open_files
from bottega.storage import os_errors, sqlite_files
from bottega.v1 import image_pb2

# Errors of SQLite when it could not open a file: its own, the log beside it, or what readers share.
_OPENS_FILES = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY})
# Texts by primary result code, https://sqlite.org/rescode.html; extended codes have it in their low byte.
_TEXTS = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_READONLY: "the disk cannot be written",
    sqlite3.SQLITE_PERM: "the disk cannot be written",
    sqlite3.SQLITE_CANTOPEN: "the job store cannot be opened",
    sqlite3.SQLITE_IOERR: "the disk is full or fails",
    sqlite3.SQLITE_BUSY: "another process uses the job store",
    sqlite3.SQLITE_LOCKED: "another process uses the job store",
    sqlite3.SQLITE_PROTOCOL: "another process uses the job store",
    sqlite3.SQLITE_NOMEM: "the job store could not get memory",
}
FileState = tuple[tuple[int, int, int], ...]
"""Inode, size and last change in ns of the database file and of the write-ahead log beside it."""

# "Bttg": the application_id of our files.
APPLICATION_ID = 0x42747467
_VERSION = 17
# Deletions that are remembered: as many as jobs by default.
_MAX_DELETIONS = 10_000
# Pages of 4 KiB in the log after which a commit copies it into the file: 4 MiB, which takes about 10 ms.
_CHECKPOINT_PAGES = 1000
# Upper bound on the log's file after a checkpoint, which large inputs make large.
LOG_BYTES = 64 << 20

# Columns of the table and their types, in the order of `rows.VALUES`, and the checksum of a row.
TYPES = {
    "job_id": "TEXT NOT NULL UNIQUE",
    "tenant": "TEXT NOT NULL",
    "request_id": "TEXT NOT NULL",
    "log_id": "TEXT NOT NULL",
    "ends_with_caller": "INTEGER NOT NULL",
    "priority": "INTEGER NOT NULL",
    "fingerprint": "TEXT NOT NULL",
    "state": "INTEGER NOT NULL",
    "spec": "BLOB NOT NULL",
    "latent_height": "INTEGER NOT NULL",
    "latent_width": "INTEGER NOT NULL",
    "evaluations_per_step": "REAL NOT NULL",
    "keeps_steps": "INTEGER NOT NULL",
    "image_digest": "TEXT NOT NULL",
    "mask_digest": "TEXT NOT NULL",
    "kept_digest": "TEXT NOT NULL",
    "result_width": "INTEGER NOT NULL",
    "result_height": "INTEGER NOT NULL",
    "edit_source": "TEXT NOT NULL",
    "computed_share": "REAL NOT NULL",
    "size_bytes": "INTEGER NOT NULL",
    "created_wall": "REAL NOT NULL",
    "started_wall": "REAL",
    "ended_wall": "REAL",
    "deadline_steady": "REAL",
    "attempt": "INTEGER NOT NULL",
    "deaths": "INTEGER NOT NULL",
    "decisions": "BLOB NOT NULL",
    "images": "TEXT NOT NULL",
    "picture_bytes": "INTEGER NOT NULL",
    "provenance": "BLOB NOT NULL",
    "error": "BLOB NOT NULL",
    "peer": "TEXT NOT NULL",
    "webhook": "BLOB NOT NULL",
    "ended_steady": "REAL",
    "result_key": "TEXT NOT NULL",
    "steps_done": "INTEGER NOT NULL",
    "checksum": "INTEGER NOT NULL",
}
# kept_bytes: the size of an ended job's record, with an estimate for the short columns and indexes. finished: whether
# it completed, so that it is forgotten last.
_FINISHED = f"(state = {image_pb2.JOB_STATE_COMPLETED})"
_TABLES = (
    f"""
    CREATE TABLE jobs (
        sequence INTEGER PRIMARY KEY AUTOINCREMENT,
        {", ".join(f"{name} {kind}" for name, kind in TYPES.items())},
        kept_bytes INTEGER NOT NULL GENERATED ALWAYS AS
            (512 + length(spec) + length(decisions) + length(images) + length(provenance) + length(error)
                + length(webhook)) VIRTUAL,
        finished INTEGER GENERATED ALWAYS AS {_FINISHED} VIRTUAL
    ) STRICT
    """,
    "CREATE INDEX jobs_live ON jobs (sequence) WHERE ended_wall IS NULL",
    "CREATE INDEX jobs_ended ON jobs (ended_steady, sequence) WHERE ended_steady IS NOT NULL",
    "CREATE INDEX jobs_of_peer ON jobs (finished, peer, ended_steady, sequence) WHERE ended_steady IS NOT NULL",
    # A page takes no longer because other tenants have many jobs.
    "CREATE INDEX jobs_of_tenant ON jobs (tenant, sequence)",
    "CREATE INDEX jobs_state ON jobs (tenant, state, sequence)",
    "CREATE INDEX jobs_created ON jobs (tenant, created_wall)",
    "CREATE INDEX jobs_result ON jobs (result_key, sequence) WHERE result_key <> ''",
    """
    CREATE TRIGGER jobs_added AFTER INSERT ON jobs BEGIN
        UPDATE totals SET jobs = jobs + 1, bytes = bytes + NEW.kept_bytes;
    END
    """,
    """
    CREATE TRIGGER jobs_changed AFTER UPDATE ON jobs WHEN NEW.kept_bytes <> OLD.kept_bytes BEGIN
        UPDATE totals SET bytes = bytes + NEW.kept_bytes - OLD.kept_bytes;
    END
    """,
    """
    CREATE TRIGGER jobs_forgotten AFTER DELETE ON jobs BEGIN
        UPDATE totals SET jobs = jobs - 1, bytes = bytes - OLD.kept_bytes;
    END
    """,
    """
    CREATE TRIGGER jobs_added_of_peer AFTER INSERT ON jobs WHEN NEW.ended_steady IS NOT NULL BEGIN
        INSERT INTO holders VALUES (NEW.finished, NEW.peer, 1, NEW.kept_bytes)
        ON CONFLICT (finished, peer) DO UPDATE SET jobs = jobs + 1, bytes = bytes + excluded.bytes;
    END
    """,
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
    # What quotas need to know. The counts of today and yesterday stay.
    f"""
    CREATE TRIGGER jobs_of_today AFTER INSERT ON jobs BEGIN
        INSERT INTO days VALUES (NEW.tenant, CAST(NEW.created_wall / {DAY_S} AS INTEGER), 1)
        ON CONFLICT (tenant, day) DO UPDATE SET jobs = jobs + 1;
        DELETE FROM days WHERE tenant = NEW.tenant AND day < CAST(NEW.created_wall / {DAY_S} AS INTEGER) - 1;
    END
    """,
    """
    CREATE TRIGGER pictures_added AFTER INSERT ON jobs WHEN NEW.picture_bytes > 0 BEGIN
        INSERT INTO stored VALUES (NEW.tenant, NEW.picture_bytes)
        ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + excluded.bytes;
    END
    """,
    """
    CREATE TRIGGER pictures_changed AFTER UPDATE OF picture_bytes ON jobs
    WHEN NEW.picture_bytes <> OLD.picture_bytes BEGIN
        INSERT INTO stored VALUES (NEW.tenant, NEW.picture_bytes - OLD.picture_bytes)
        ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + excluded.bytes;
    END
    """,
    """
    CREATE TRIGGER pictures_forgotten AFTER DELETE ON jobs WHEN OLD.picture_bytes > 0 BEGIN
        UPDATE stored SET bytes = bytes - OLD.picture_bytes WHERE tenant = OLD.tenant;
        DELETE FROM stored WHERE tenant = OLD.tenant AND bytes < 1;
    END
    """,
    """
    CREATE TABLE days (
        tenant TEXT NOT NULL,
        day INTEGER NOT NULL,
        jobs INTEGER NOT NULL,
        PRIMARY KEY (tenant, day)
    ) STRICT, WITHOUT ROWID
    """,
    "CREATE TABLE stored (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) STRICT, WITHOUT ROWID",
    # The newest job of each request_id.
    """
    CREATE TABLE request_ids (
        tenant TEXT NOT NULL,
        request_id TEXT NOT NULL,
        sequence INTEGER NOT NULL,
        PRIMARY KEY (tenant, request_id)
    ) STRICT, WITHOUT ROWID
    """,
    # Pictures of completed jobs, and what is kept of them. An edit finds the latents of its image here; a deletion
    # finds whether another job has the same picture.
    """
    CREATE TABLE contents (
        tenant TEXT NOT NULL,
        digest TEXT NOT NULL,
        sequence INTEGER NOT NULL,
        has_latents INTEGER NOT NULL,
        PRIMARY KEY (tenant, digest, sequence)
    ) STRICT, WITHOUT ROWID
    """,
    "CREATE INDEX contents_of_job ON contents (sequence)",
    """
    CREATE TRIGGER jobs_forgotten_with_contents AFTER DELETE ON jobs WHEN OLD.picture_bytes > 0 BEGIN
        DELETE FROM contents WHERE sequence = OLD.sequence;
    END
    """,
    # Jobs that callers deleted, so that a repeated call is answered as the first one was. contents: a JSON list.
    """
    CREATE TABLE deletions (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        job_id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        contents TEXT NOT NULL,
        steady REAL NOT NULL
    ) STRICT
    """,
    f"""
    CREATE TRIGGER deletions_bounded AFTER INSERT ON deletions BEGIN
        DELETE FROM deletions WHERE number <= NEW.number - {_MAX_DELETIONS};
    END
    """,
    # Webhook events of ended jobs; see OutboxEvent. Numbers begin at the time in ms, so that they go on from those of a
    # file that was lost.
    """
    CREATE TABLE outbox (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        event_id TEXT NOT NULL UNIQUE,
        job_id TEXT NOT NULL,
        tenant TEXT NOT NULL,
        kind TEXT NOT NULL,
        url TEXT NOT NULL,
        host TEXT NOT NULL,
        body BLOB NOT NULL,
        created_wall REAL NOT NULL,
        tried_since_steady REAL NOT NULL,
        due_steady REAL NOT NULL,
        attempts INTEGER NOT NULL,
        error TEXT NOT NULL,
        dead INTEGER NOT NULL,
        checksum INTEGER NOT NULL
    ) STRICT
    """,
    "CREATE INDEX outbox_listed ON outbox (dead, tenant, number)",
    "INSERT INTO sqlite_sequence VALUES ('outbox', CAST(strftime('%s', 'now') AS INTEGER) * 1000)",
    # Inputs of live jobs, in a table of their own so that a change of a job does not rewrite them.
    "CREATE TABLE inputs (sequence INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, data BLOB NOT NULL) STRICT",
    "CREATE TABLE totals (jobs INTEGER NOT NULL, bytes INTEGER NOT NULL) STRICT",
    "INSERT INTO totals VALUES (0, 0)",
    # Ended jobs by peer, which decides whose are forgotten when there are too many.
    """
    CREATE TABLE holders (
        finished INTEGER NOT NULL,
        peer TEXT NOT NULL,
        jobs INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        PRIMARY KEY (finished, peer)
    ) STRICT, WITHOUT ROWID
    """,
    "CREATE INDEX holders_jobs ON holders (finished, jobs DESC, peer)",
    "CREATE INDEX holders_bytes ON holders (finished, bytes DESC, peer)",
    "CREATE TABLE generation (number INTEGER NOT NULL) STRICT",
    "INSERT INTO generation VALUES (0)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {_VERSION}",
)


def connect_to_write(path: Path) -> sqlite3.Connection:
    """Return a connection whose commits are on the disk when they return. Transactions are begun explicitly.

    One thread at a time may use it. Raises sqlite3.Error.
    """
    return sqlite_files.connect_alone(
        path,
        "PRAGMA journal_mode = WAL",
        "PRAGMA synchronous = FULL",
        f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}",
        f"PRAGMA journal_size_limit = {LOG_BYTES}",
    )


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Return a read-only connection, which may open any SQLite file. Otherwise as `connect_to_write`."""
    return sqlite_files.connect_alone(path, "PRAGMA query_only = ON")


def state_of(path: Path) -> FileState:
    """Return a value that changes when the file or its write-ahead log changes. Raises OSError."""
    parts = [part.stat() for part in (path, sqlite_files.log_of(path)) if part.exists()]
    return tuple((part.st_ino, part.st_size, part.st_mtime_ns) for part in parts)


def has_tables(connection: sqlite3.Connection, path: Path) -> bool:
    """Return True if the file has the tables of a job store, False if it is empty. Raises ConfigError for others."""
    return sqlite_files.has_tables(
        connection, path, application_id=APPLICATION_ID, version=_VERSION, what="a job store of Bottega"
    )


def is_sound(connection: sqlite3.Connection, *, made: bool) -> bool:
    """Return whether the file is undamaged. The check takes about a second. Raises sqlite3.Error.

    Args:
        connection: Connection to the file.
        made: Whether the file has the tables of a job store.
    """
    return sqlite_files.is_whole(connection) and (not made or sqlite_files.schema_of(connection) == _expected_schema())


def adopt(connection: sqlite3.Connection, path: Path) -> int:
    """Create missing tables, count a new start of the gateway, and return its number. Call it in a transaction."""
    if not has_tables(connection, path):
        _create(connection, _TABLES)
    ((generation,),) = connection.execute("UPDATE generation SET number = number + 1 RETURNING number").fetchall()
    return int(generation)


def readopt(connection: sqlite3.Connection, path: Path, *, generation: int, newest: int) -> None:
    """Create the tables if there are none, without counting a new start. Call it in a transaction.

    Args:
        connection: Connection to the file.
        path: The file.
        generation: Number of the current start of the gateway.
        newest: The last sequence number that was assigned; later jobs get higher ones.
    """
    if not has_tables(connection, path):
        _create(connection, _TABLES)
    raise_generation(connection, generation)
    connection.execute("DELETE FROM sqlite_sequence WHERE name = 'jobs' AND seq <= ?", (newest,))
    connection.execute(
        "INSERT INTO sqlite_sequence SELECT 'jobs', ? WHERE NOT EXISTS "
        "(SELECT 1 FROM sqlite_sequence WHERE name = 'jobs')",
        (newest,),
    )


def newest_generation(connection: sqlite3.Connection) -> int:
    """Return the newest generation, or 0 before the first start of a gateway."""
    ((number,),) = connection.execute("SELECT number FROM generation").fetchall()
    return int(number)


def raise_generation(connection: sqlite3.Connection, least: int) -> None:
    """Let the next start of the gateway have a generation above `least`."""
    connection.execute("UPDATE generation SET number = max(number, ?)", (least,))


def newest_sequence(connection: sqlite3.Connection) -> int:
    """Return the last sequence number that was assigned, or 0."""
    found = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
    return int(found[0]) if found else 0


def _create(connection: sqlite3.Connection, statements: Sequence[str]) -> None:
    for statement in statements:
        connection.execute(statement)


def _expected_schema() -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        _create(connection, _TABLES)
        return sqlite_files.schema_of(connection)


def typed_error(error: sqlite3.Error) -> BottegaError | None:
    """Convert an error of SQLite to DataLoss or StorageUnavailable; return None if only a bug can cause it.

    The returned error does not contain SQLite's text. SQLite does not say why it could not open a file. If the process
    cannot open any file at all, that is given as the reason.
    """
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return None
    if sqlite_files.says_damage(error):
        return damaged()
    text = _TEXTS.get(code & 0xFF)
    if text and code & 0xFF in _OPENS_FILES and (why := open_files.exhausted()):
        return open_files.too_many(why)
    return os_errors.unavailable(text, cause=error.sqlite_errorname) if text else None


def damaged() -> DataLoss:
    """Return the error for a store that is damaged."""
    return DataLoss("the job store is damaged; its operator has to look after it")
