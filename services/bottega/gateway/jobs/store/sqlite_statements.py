"""The SQL of the job store. Each function is one operation in a transaction, or one query.

Each row has a checksum, so that damaged rows are never used. SQLite's own format has none: after a flipped bit in a
page, another prompt may be read.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bottega.errors import DataLoss
from bottega.gateway.jobs.store.job_store import Change, EndTime, EventOf, JobFilter, JobRecord, RemovedJobs
from bottega.gateway.jobs.store.quotas import DAY_S, MINUTE_S, TenantUsage, check_quotas, is_bounded
from bottega.gateway.jobs.store.rows import VALUES, record_of, values_of
from bottega.gateway.jobs.store.sqlite_outbox import insert_event
from bottega.gateway.jobs.store.sqlite_schema import damaged
from bottega.rpc.security.tenant_file import Quotas
from bottega.storage.sqlite_files import Value, checksum
from bottega.v1.image_pb2 import JOB_STATE_QUEUED

COLUMNS = (*VALUES, "checksum")
_ALL = ", ".join(f"jobs.{name}" for name in ("sequence", *COLUMNS))
_INSERT = (
    f"INSERT INTO jobs ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))}) ON CONFLICT (job_id) DO NOTHING"
)
_PUT_BACK = f"INSERT INTO jobs (sequence, {', '.join(COLUMNS)}) VALUES ({', '.join('?' * (len(COLUMNS) + 1))})"
_EXPIRED = (
    "SELECT sequence, tenant, request_id FROM jobs WHERE ended_steady IS NOT NULL AND ended_steady < ? "
    "ORDER BY ended_steady, sequence LIMIT ?"
)
_OLDEST = (
    "SELECT sequence, tenant, request_id FROM jobs WHERE finished = ? AND peer = ? AND ended_steady IS NOT NULL "
    "ORDER BY ended_steady, sequence LIMIT 1"
)
_UPDATE = f"UPDATE jobs SET ({', '.join(COLUMNS)}) = ({', '.join('?' * len(COLUMNS))}) WHERE sequence = ?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The result of a query for jobs, in the order of the query."""

    records: list[JobRecord]
    damaged: list[int]
    """Sequence numbers of the jobs that are omitted because their rows are damaged."""


def add(
    connection: sqlite3.Connection,
    record: JobRecord,
    inputs: bytes,
    *,
    replaces: str,
    event_of: EventOf,
    quotas: Quotas,
) -> JobRecord:
    """Insert a job unless its job_id or request_id is stored already; see JobStore.add."""
    known = _known(connection, record, replaces) if record.request_id else None
    if known is None and is_bounded(quotas):
        check_quotas(
            quotas, usage_of(connection, record.tenant, now_wall=record.created_wall), now_wall=record.created_wall
        )
    # Most jobs have no request_id and need only this statement. At each statement the thread may wait for the GIL.
    inserted = connection.execute(_INSERT, to_row(record)) if known is None else None
    if inserted is None or not inserted.rowcount:
        known = known or of_job(connection, record.job_id)
        assert known is not None
        return known
    sequence = inserted.lastrowid
    assert sequence is not None
    if record.request_id:
        connection.execute(
            "INSERT OR REPLACE INTO request_ids VALUES (?, ?, ?)", (record.tenant, record.request_id, sequence)
        )
    if inputs:
        connection.execute("INSERT INTO inputs VALUES (?, ?, ?)", (sequence, checksum([inputs]), inputs))
    _index_contents(connection, record, sequence)
    if not record.live:
        _announce(connection, record, event_of)
    return replace(record, sequence=sequence)


def put_back(connection: sqlite3.Connection, record: JobRecord, inputs: bytes) -> None:
    """Insert a live job with its earlier sequence number, replacing rows that the file has for it."""
    connection.execute("DELETE FROM inputs WHERE sequence = ?", (record.sequence,))
    connection.execute("DELETE FROM jobs WHERE job_id = ? OR sequence = ?", (record.job_id, record.sequence))
    connection.execute(_PUT_BACK, (record.sequence, *to_row(record)))
    if record.request_id:
        connection.execute(
            "INSERT OR REPLACE INTO request_ids VALUES (?, ?, ?)", (record.tenant, record.request_id, record.sequence)
        )
    if inputs:
        connection.execute("INSERT INTO inputs VALUES (?, ?, ?)", (record.sequence, checksum([inputs]), inputs))


def update(connection: sqlite3.Connection, job_id: str, change: Change, *, event_of: EventOf) -> bool:
    """Apply `change` to a job and write the result and the event of its end. Return whether anything changed."""
    record = of_job(connection, job_id)
    after = change(record) if record else None
    if record is None or after is None:
        return False
    connection.execute(_UPDATE, (*to_row(after), after.sequence))
    if not after.live:
        connection.execute("DELETE FROM inputs WHERE sequence = ?", (after.sequence,))
    if record.live:
        _index_contents(connection, after, after.sequence)
    if record.live and not after.live:
        _announce(connection, after, event_of)
    return True


def delete(connection: sqlite3.Connection, job_id: str, *, tenant: str, steady: float) -> list[str] | None:
    """Delete an ended job, and return the digests of images and latents that no other job of its tenant has."""
    record = of_job(connection, job_id, tenant=tenant)
    if record is None:
        digests = deleted_contents(connection, job_id, tenant)
    elif record.live:
        return None
    else:
        digests = list(record.contents)
        _forget_one(connection, record.sequence, tenant, record.request_id)
        row = (job_id, tenant, json.dumps(digests), float(steady))
        connection.execute("INSERT INTO deletions (job_id, tenant, contents, steady) VALUES (?, ?, ?, ?)", row)
    if digests is None:
        return None
    query = "SELECT 1 FROM contents WHERE tenant = ? AND digest = ? LIMIT 1"
    return [digest for digest in digests if not connection.execute(query, (tenant, digest)).fetchone()]


def deleted_contents(connection: sqlite3.Connection, job_id: str, tenant: str) -> list[str] | None:
    """Return the digests of a deleted job's images and kept latents; None if the deletion is not remembered."""
    query = "SELECT contents FROM deletions WHERE job_id = ? AND tenant = ?"
    found = connection.execute(query, (job_id, tenant)).fetchone()
    return None if found is None else json.loads(found[0])


def removed(connection: sqlite3.Connection) -> RemovedJobs:
    """Return the deletions that are remembered, and the numbers of jobs by day."""
    deletions = connection.execute("SELECT job_id, tenant, contents, steady FROM deletions ORDER BY number").fetchall()
    days = connection.execute("SELECT tenant, day, jobs FROM days").fetchall()
    return RemovedJobs(deletions=deletions, accepted={(tenant, day): jobs for tenant, day, jobs in days})


def remember(connection: sqlite3.Connection, removed: RemovedJobs) -> None:
    """Insert deletions that are not known, and raise the numbers of jobs by day."""
    connection.executemany(
        "INSERT OR IGNORE INTO deletions (job_id, tenant, contents, steady) VALUES (?, ?, ?, ?)", removed.deletions
    )
    connection.executemany(
        "INSERT INTO days VALUES (?, ?, ?) ON CONFLICT (tenant, day) DO UPDATE SET jobs = max(jobs, excluded.jobs)",
        [(*key, jobs) for key, jobs in removed.accepted.items()],
    )


def of_job(connection: sqlite3.Connection, job_id: str, *, tenant: str | None = None) -> JobRecord | None:
    """Return the job with this ID, or None if it does not exist or belongs to a tenant other than `tenant`."""
    query = f"SELECT {_ALL} FROM jobs WHERE job_id = ?"
    whose = [] if tenant is None else [tenant]
    found = _records(connection, query + " AND tenant = ?" * len(whose), job_id, *whose)
    return found[0] if found else None


def of_request(connection: sqlite3.Connection, request_id: str, *, tenant: str) -> JobRecord | None:
    """Return the newest job with a tenant's request_id, or None."""
    query = (
        f"SELECT {_ALL} FROM request_ids JOIN jobs USING (sequence) "
        "WHERE request_ids.tenant = ? AND request_ids.request_id = ?"
    )
    found = _records(connection, query, tenant, request_id)
    return found[0] if found else None


def usage_of(connection: sqlite3.Connection, tenant: str, *, now_wall: float) -> TenantUsage:
    """Return the counts of jobs and bytes of a tenant that quotas limit."""
    query = (
        "SELECT COALESCE((SELECT jobs FROM days WHERE tenant = ?1 AND day = ?2), 0), "
        "COALESCE((SELECT bytes FROM stored WHERE tenant = ?1), 0), "
        "(SELECT COUNT(*) FROM jobs WHERE tenant = ?1 AND created_wall > ?3), "
        "(SELECT MIN(created_wall) FROM jobs WHERE tenant = ?1 AND created_wall > ?3), "
        "(SELECT COUNT(*) FROM jobs WHERE tenant = ?1 AND state = ?4)"
    )
    parameters = (tenant, int(now_wall // DAY_S), now_wall - MINUTE_S, JOB_STATE_QUEUED)
    today, size_bytes, in_minute, oldest, waiting = connection.execute(query, parameters).fetchone()
    return TenantUsage(
        jobs_today=today,
        stored_bytes=size_bytes,
        jobs_in_minute=in_minute,
        oldest_in_minute=oldest,
        waiting=waiting,
    )


def with_result(connection: sqlite3.Connection, result_key: str, *, limit: int) -> Listing:
    """Return the newest jobs with a result key."""
    # Only jobs that have a key are in the index, and SQLite uses it only if the query says so, too.
    where = "result_key = ? AND result_key <> ''"
    query = f"SELECT {_ALL} FROM jobs WHERE {where} ORDER BY jobs.sequence DESC LIMIT ?"
    return _listing(connection.execute(query, (result_key, limit)).fetchall())


def with_kept_picture(connection: sqlite3.Connection, digest: str, *, tenant: str, limit: int) -> Listing:
    """Return the newest jobs of a tenant that keep latents of an image."""
    query = (
        f"SELECT {_ALL} FROM contents JOIN jobs USING (sequence) "
        "WHERE contents.tenant = ? AND digest = ? AND has_latents ORDER BY jobs.sequence DESC LIMIT ?"
    )
    return _listing(connection.execute(query, (tenant, digest, limit)).fetchall())


def inputs_of(connection: sqlite3.Connection, job_id: str) -> bytes | None:
    """Return the serialized inputs of a live job, or None."""
    query = "SELECT data, inputs.checksum, sequence FROM inputs JOIN jobs USING (sequence) WHERE job_id = ?"
    rows = connection.execute(query, (job_id,)).fetchall()
    return intact(*rows[0]) if rows else None


def last_end(connection: sqlite3.Connection) -> EndTime | None:
    """Return the latest end of a job. If the newest rows are damaged, use the first undamaged one of the last 16."""
    query = f"SELECT {_ALL} FROM jobs WHERE ended_steady IS NOT NULL ORDER BY ended_steady DESC, sequence DESC LIMIT 16"
    for record in _listing(connection.execute(query).fetchall()).records:
        if record.ended_wall is not None and record.ended_steady is not None:
            return EndTime(wall=record.ended_wall, steady=record.ended_steady)
    return None


def live(connection: sqlite3.Connection) -> Listing:
    """Return all jobs that have not ended, oldest first."""
    query = f"SELECT {_ALL} FROM jobs WHERE ended_wall IS NULL ORDER BY jobs.sequence"
    return _listing(connection.execute(query).fetchall())


def every(connection: sqlite3.Connection, *, after: int, limit: int) -> Listing:
    """Return the first jobs of all tenants with sequence numbers above `after`."""
    query = f"SELECT {_ALL} FROM jobs WHERE sequence > ? ORDER BY sequence LIMIT ?"
    return _listing(connection.execute(query, (after, limit)).fetchall())


def contents(connection: sqlite3.Connection) -> dict[str, set[str]]:
    """Return the tenants that own each image and each file of kept latents, by digest."""
    owners: dict[str, set[str]] = {}
    for digest, tenant in connection.execute("SELECT digest, tenant FROM contents"):
        owners.setdefault(digest, set()).add(tenant)
    return owners


def page(connection: sqlite3.Connection, wanted: JobFilter, *, size: int, before_sequence: int | None) -> Listing:
    """Return a page of jobs. Damaged jobs do not count, so the page is full if there are enough others."""
    found = Listing(records=[], damaged=[])
    while True:
        rows = _page_rows(connection, wanted, size, before_sequence)
        more = _listing(rows)
        found.records.extend(more.records)
        found.damaged.extend(more.damaged)
        if len(rows) < size or len(found.records) >= size:
            return replace(found, records=found.records[:size])
        before_sequence = rows[-1][0]


def forget(connection: sqlite3.Connection, *, ended_before: float, max_jobs: int, max_bytes: int, limit: int) -> int:
    """Delete up to `limit` ended jobs; see JobStore.forget for their order."""
    connection.execute("DELETE FROM deletions WHERE steady < ?", (ended_before,))
    expired = connection.execute(_EXPIRED, (ended_before, limit)).fetchall()
    for job in expired:
        _forget_one(connection, *job)
    forgotten = len(expired)
    while forgotten < limit:
        ((jobs, size_bytes),) = connection.execute("SELECT jobs, bytes FROM totals").fetchall()
        if jobs <= max_jobs and size_bytes <= max_bytes:
            break
        job = _dispensable(connection, "jobs" if jobs > max_jobs else "bytes")
        if job is None:
            break  # the others have not ended
        _forget_one(connection, *job)
        forgotten += 1
    return forgotten


def probe(connection: sqlite3.Connection) -> None:
    """Check that the disk can be written, by writing a page with unchanged contents."""
    connection.execute("UPDATE generation SET number = number")


def _announce(connection: sqlite3.Connection, record: JobRecord, event_of: EventOf) -> None:
    event = event_of(record)
    if event is not None:
        insert_event(connection, event)


def _index_contents(connection: sqlite3.Connection, record: JobRecord, sequence: int) -> None:
    kept = record.kept_pictures
    rows = [(record.tenant, digest, sequence, digest in kept) for digest in record.contents]
    if rows:
        connection.executemany("INSERT INTO contents VALUES (?, ?, ?, ?)", rows)


def _dispensable(connection: sqlite3.Connection, by: str) -> tuple[int, str, str] | None:
    """Return the ended job to delete next: one of the peer with the most "jobs" or "bytes", as `by` says; or None."""
    most = f"SELECT peer FROM holders WHERE finished = ? ORDER BY {by} DESC, peer LIMIT 1"
    for finished in (False, True):
        while holder := connection.execute(most, (finished,)).fetchone():
            found: tuple[int, str, str] | None = connection.execute(_OLDEST, (finished, *holder)).fetchone()
            if found is not None:
                return found
            # The count is wrong because of damage. Without this, nothing would ever be deleted.
            connection.execute("DELETE FROM holders WHERE finished = ? AND peer = ?", (finished, *holder))
    return None


def _forget_one(connection: sqlite3.Connection, sequence: int, tenant: str, request_id: str) -> None:
    connection.execute(
        "DELETE FROM request_ids WHERE tenant = ? AND request_id = ? AND sequence = ?", (tenant, request_id, sequence)
    )
    connection.execute("DELETE FROM jobs WHERE sequence = ?", (sequence,))


def _known(connection: sqlite3.Connection, record: JobRecord, replaces: str) -> JobRecord | None:
    """Return the stored job with the job_id or request_id of `record` that `record` does not replace, or None."""
    known = of_job(connection, record.job_id)
    if known is None:
        known = of_request(connection, record.request_id, tenant=record.tenant)
        if known is not None and known.is_replaced_by(record, replaces=replaces):
            known = None
    return known


def _page_rows(
    connection: sqlite3.Connection, wanted: JobFilter, size: int, before_sequence: int | None
) -> list[tuple[Any, ...]]:
    limits = {
        "created_wall >= ?": wanted.created_after,
        "created_wall < ?": wanted.created_before,
        "sequence < ?": before_sequence,
    }
    conditions: dict[str, list[Value]] = {"tenant = ?": [wanted.tenant]}
    conditions |= {limit: [value] for limit, value in limits.items() if value is not None}
    if wanted.states:
        conditions[f"state IN ({', '.join('?' * len(wanted.states))})"] = [int(state) for state in wanted.states]
    where = f"WHERE {' AND '.join(conditions)}"
    parameters = [value for values in conditions.values() for value in values]
    query = f"SELECT {_ALL} FROM jobs {where} ORDER BY sequence DESC LIMIT ?"
    return connection.execute(query, (*parameters, size)).fetchall()


def _listing(rows: list[tuple[Any, ...]]) -> Listing:
    found = Listing(records=[], damaged=[])
    for row in rows:
        try:
            found.records.append(from_row(row))
        except DataLoss:
            found.damaged.append(row[0])
    return found


def _records(connection: sqlite3.Connection, query: str, *parameters: Value) -> list[JobRecord]:
    # Fetch all rows at once: a statement that is not read to its end hides newer data from later ones.
    return [from_row(row) for row in connection.execute(query, parameters).fetchall()]


def to_row(record: JobRecord) -> tuple[Value, ...]:
    """Return the values of a record, in the order of COLUMNS, with their checksum."""
    values = values_of(record)
    return (*values, checksum(values))


def from_row(row: Sequence[Any]) -> JobRecord:
    """Return the record of a row that has `sequence` and then COLUMNS. Raises DataLoss if the row is damaged."""
    sequence, *values, expected = row
    if checksum(values) != expected:
        raise _damaged_row(sequence)
    return record_of(sequence, values)


def intact(data: bytes, expected: int, sequence: int) -> bytes:
    """Return `data` if its checksum is right. Raises DataLoss otherwise."""
    if checksum([data]) != expected:
        raise _damaged_row(sequence)
    return data


def _damaged_row(sequence: int) -> DataLoss:
    error = damaged()
    error.metadata["sequence"] = str(sequence)
    return error
