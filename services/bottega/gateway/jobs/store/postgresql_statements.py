"""Operations of the PostgreSQL job store that take several statements. Their callers begin the transactions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bottega.gateway.jobs.store.job_store import EventOf, JobRecord, RemovedJobs
from bottega.gateway.jobs.store.postgresql_forgetting import count_removed
from bottega.gateway.jobs.store.postgresql_outbox import insert_event
from bottega.gateway.jobs.store.postgresql_schema import MAX_DELETIONS
from bottega.gateway.jobs.store.quotas import DAY_S, MINUTE_S, TenantUsage, check_quotas
from bottega.gateway.jobs.store.rows import VALUES, record_of, values_of
from bottega.rpc.security.tenant_file import Quotas
from bottega.storage.postgresql import Connection, rows_of
from bottega.v1.image_pb2 import JOB_STATE_QUEUED

ALL = ", ".join(f"jobs.{name}" for name in ("sequence", *VALUES))
_NAMES = ", ".join(VALUES)
_VALUES = ", ".join(f"%({name})s" for name in VALUES)
_INSERT = f"INSERT INTO jobs ({_NAMES}) SELECT {_VALUES}{{within}} ON CONFLICT (job_id) DO NOTHING RETURNING sequence"
# What quotas limit, by quota; the parameters are those of _usage_parameters.
_USED = {
    "queued": f"(SELECT count(*) FROM jobs WHERE tenant = %(tenant)s AND state = {JOB_STATE_QUEUED})",
    "per_minute": "(SELECT count(*) FROM jobs WHERE tenant = %(tenant)s AND created_wall > %(minute)s)"
    " + (SELECT count(*) FROM removed_jobs WHERE tenant = %(tenant)s AND created_wall > %(minute)s)",
    "per_day": "(SELECT coalesce(sum(jobs), 0) FROM days WHERE tenant = %(tenant)s AND day = %(day)s)",
    "stored_bytes": "(SELECT coalesce(sum(bytes), 0) FROM stored WHERE tenant = %(tenant)s)",
}
_OLDEST = (
    "least((SELECT min(created_wall) FROM jobs WHERE tenant = %(tenant)s AND created_wall > %(minute)s),"
    " (SELECT min(created_wall) FROM removed_jobs WHERE tenant = %(tenant)s AND created_wall > %(minute)s))"
)
# Takes over the request_id of a job that may be replaced; returns nothing if another job has it.
_CLAIM = """
    INSERT INTO request_ids VALUES (%s, %s, %s) ON CONFLICT (tenant, request_id)
    DO UPDATE SET sequence = excluded.sequence WHERE request_ids.sequence = %s RETURNING sequence
"""
_ACCEPTED = "SELECT tenant, day, sum(jobs) FROM days GROUP BY tenant, day"


class ClaimedMeanwhile(Exception):
    """Another transaction has taken the request_id of a job that is being added."""


async def add(
    connection: Connection, record: JobRecord, inputs: bytes, *, replaces: str, event_of: EventOf, quotas: Quotas
) -> JobRecord:
    """Insert a job unless its job_id or request_id is stored; see JobStore.add. Raise ClaimedMeanwhile: try again.

    No other transaction adds jobs of a tenant with quotas meanwhile.
    """
    known = None
    if record.request_id:
        known = await of_job(connection, record.job_id)
        known = known or await of_request(connection, record.request_id, record.tenant)
    if known is not None and not (known.job_id != record.job_id and known.is_replaced_by(record, replaces=replaces)):
        return known
    within = _within(quotas)
    parameters = {
        **dict(zip(VALUES, values_of(record), strict=True)),
        **_usage_parameters(record.tenant, record.created_wall),
        **{f"max_{quota}": getattr(quotas, quota) for quota in _USED},
    }
    inserted = await rows_of(connection, _INSERT.format(within=within), parameters)
    if not inserted:
        found = await of_job(connection, record.job_id)
        if found is None and within:
            usage = await usage_of(connection, record.tenant, now_wall=record.created_wall, quotas=quotas)
            check_quotas(quotas, usage, now_wall=record.created_wall)
        if found is None:  # it was deleted a moment ago
            raise ClaimedMeanwhile
        return found
    ((sequence,),) = inserted
    if record.request_id:
        claim = (record.tenant, record.request_id, sequence, known.sequence if known else None)
        if not await rows_of(connection, _CLAIM, claim):
            raise ClaimedMeanwhile
    if inputs:
        await connection.execute("INSERT INTO inputs VALUES (%s, %s)", (sequence, inputs))
    added = replace(record, sequence=sequence)
    if not added.live:
        await _index_contents(connection, added)
        await _announce(connection, added, event_of)
    return added


def _within(quotas: Quotas) -> str:
    """Return a condition that a job is within quotas; empty if there is no bound."""
    bounded = [f"{used} < %(max_{quota})s" for quota, used in _USED.items() if getattr(quotas, quota)]
    return f" WHERE {' AND '.join(bounded)}" if bounded else ""


async def usage_of(
    connection: Connection, tenant: str, *, now_wall: float, quotas: Quotas | None = None
) -> TenantUsage:
    """Return the counts of jobs and bytes of a tenant that quotas limit.

    Args:
        quotas: Only what these limit is counted; None for all.
    """
    used = {quota: text for quota, text in _USED.items() if quotas is None or getattr(quotas, quota)}
    oldest = _OLDEST if "per_minute" in used else "NULL::float8"
    query = f"SELECT {', '.join([oldest, *used.values()])}"
    ((oldest_in_minute, *counts),) = await rows_of(connection, query, _usage_parameters(tenant, now_wall))
    count = dict(zip(used, map(int, counts), strict=True))
    return TenantUsage(
        jobs_today=count.get("per_day", 0),
        stored_bytes=count.get("stored_bytes", 0),
        jobs_in_minute=count.get("per_minute", 0),
        oldest_in_minute=oldest_in_minute,
        waiting=count.get("queued", 0),
    )


def _usage_parameters(tenant: str, now_wall: float) -> dict[str, Any]:
    return {"tenant": tenant, "day": int(now_wall // DAY_S), "minute": now_wall - MINUTE_S}


async def of_job(connection: Connection, job_id: str) -> JobRecord | None:
    """Return the job with this ID, or None."""
    found = await records_of(connection, f"SELECT {ALL} FROM jobs WHERE job_id = %s", job_id)
    return found[0] if found else None


async def of_request(connection: Connection, request_id: str, tenant: str) -> JobRecord | None:
    """Return the newest job with a tenant's request_id, or None."""
    query = (
        f"SELECT {ALL} FROM request_ids JOIN jobs USING (sequence) "
        "WHERE request_ids.tenant = %s AND request_ids.request_id = %s"
    )
    found = await records_of(connection, query, tenant, request_id)
    return found[0] if found else None


async def write_changes(connection: Connection, before: JobRecord, after: JobRecord, event_of: EventOf) -> None:
    """Write the columns that differ: a progress must not write a long prompt again."""
    old, new = values_of(before), values_of(after)
    changed = [place for place, value in enumerate(new) if value != old[place]]
    if changed:
        settings = ", ".join(f"{VALUES[place]} = %s" for place in changed)
        query = f"UPDATE jobs SET {settings} WHERE sequence = %s"
        await connection.execute(query.encode(), (*(new[place] for place in changed), after.sequence))
    if before.live and not after.live:
        await connection.execute("DELETE FROM inputs WHERE sequence = %s", (after.sequence,))
        await _index_contents(connection, after)
        await _announce(connection, after, event_of)


async def _index_contents(connection: Connection, record: JobRecord) -> None:
    kept = record.kept_pictures
    for digest in record.contents:
        row = (record.tenant, digest, record.sequence, digest in kept)
        await connection.execute("INSERT INTO contents VALUES (%s, %s, %s, %s)", row)


async def _announce(connection: Connection, record: JobRecord, event_of: EventOf) -> None:
    if (event := event_of(record)) is not None:
        await insert_event(connection, event)


async def delete(connection: Connection, record: JobRecord, digests: Sequence[str], *, steady: float) -> None:
    """Delete a job, and remember that for as many jobs as MAX_DELETIONS."""
    await connection.execute("DELETE FROM jobs WHERE sequence = %s", (record.sequence,))
    await count_removed(connection, [(record.tenant, record.created_wall)])
    query = "INSERT INTO deletions (job_id, tenant, contents, steady) VALUES (%s, %s, %s, %s) RETURNING number"
    row = (record.job_id, record.tenant, json.dumps(digests), float(steady))
    ((number,),) = await rows_of(connection, query, row)
    await connection.execute("DELETE FROM deletions WHERE number <= %s", (number - MAX_DELETIONS,))


async def deleted_contents(connection: Connection, job_id: str, tenant: str) -> list[str] | None:
    """Return the digests of a deleted job's images and kept latents; None if the deletion is not remembered."""
    query = "SELECT contents FROM deletions WHERE job_id = %s AND tenant = %s"
    rows = await rows_of(connection, query, (job_id, tenant))
    return list(json.loads(rows[0][0])) if rows else None


async def removed(connection: Connection) -> RemovedJobs:
    """Return the deletions that are remembered, and the numbers of jobs by day."""
    deletions = await rows_of(connection, "SELECT job_id, tenant, contents, steady FROM deletions ORDER BY number")
    days = await rows_of(connection, _ACCEPTED)
    accepted = {(tenant, int(day)): int(jobs) for tenant, day, jobs in days}
    return RemovedJobs(deletions=[(*row[:3], float(row[3])) for row in deletions], accepted=accepted)


async def remember(connection: Connection, removed: RemovedJobs) -> None:
    """Insert deletions that are not known, and raise the numbers of jobs by day."""
    async with connection.cursor() as cursor:
        await cursor.executemany(
            "INSERT INTO deletions (job_id, tenant, contents, steady) VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING",
            removed.deletions,
        )
        counted = {(tenant, day): jobs for tenant, day, jobs in await rows_of(connection, _ACCEPTED)}
        await cursor.executemany(
            "INSERT INTO days VALUES (%s, %s, 0, %s) "
            "ON CONFLICT (tenant, day, backend) DO UPDATE SET jobs = days.jobs + excluded.jobs",
            [(*key, more) for key, jobs in removed.accepted.items() if (more := jobs - counted.get(key, 0)) > 0],
        )


async def records_of(connection: Connection, query: str, *parameters: Any) -> list[JobRecord]:
    """Return the jobs of a query for the columns ALL."""
    return [record_of(sequence, values) for sequence, *values in await rows_of(connection, query, parameters)]
