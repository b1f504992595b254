"""How the PostgreSQL job store forgets ended jobs: those that expired, and those beyond its bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bottega.gateway.jobs.store.quotas import MINUTE_S
from bottega.storage.postgresql import Connection, rows_of

_EXPIRED = """
    DELETE FROM jobs WHERE sequence IN (
        SELECT sequence FROM jobs WHERE ended_steady < %s ORDER BY ended_steady, sequence LIMIT %s
        FOR UPDATE SKIP LOCKED
    ) RETURNING tenant, created_wall
"""
_TOTALS = "SELECT count(*), coalesce(sum(kept_bytes), 0)::bigint FROM jobs"
_HELD = """
    SELECT finished, peer, count(*), sum(kept_bytes)::bigint FROM jobs WHERE ended_steady IS NOT NULL
    GROUP BY finished, peer
"""
# The first jobs of each peer that may be deleted, with their sizes.
_OLDEST = """
    SELECT finished, peer, sequence, kept_bytes FROM (
        SELECT finished, peer, sequence, kept_bytes,
            row_number() OVER (PARTITION BY finished, peer ORDER BY ended_steady, sequence) AS place
        FROM jobs WHERE ended_steady IS NOT NULL
    ) AS ended WHERE place <= %s ORDER BY place
"""
_DELETE = """
    DELETE FROM jobs WHERE sequence IN (SELECT sequence FROM jobs WHERE sequence = ANY(%s) FOR UPDATE SKIP LOCKED)
    RETURNING tenant, created_wall
"""
# Whether a job belongs to the last minute, by the database's clock, which is that of `created_wall`.
_RECENT = f"created_wall > extract(epoch FROM clock_timestamp()) - {MINUTE_S}"
_COUNT_RECENT = f"""
    WITH outdated AS (DELETE FROM removed_jobs WHERE NOT {_RECENT})
    INSERT INTO removed_jobs SELECT * FROM unnest(%s::text[], %s::float8[]) AS removed (tenant, created_wall)
    WHERE {_RECENT}
"""


async def totals(connection: Connection) -> tuple[int, int]:
    """Return the number of all jobs and the bytes of their records."""
    ((jobs, size_bytes),) = await rows_of(connection, _TOTALS)
    return int(jobs), int(size_bytes)


async def forget(connection: Connection, *, ended_before: float, bounds: tuple[int, int] | None, limit: int) -> int:
    """Delete up to `limit` ended jobs in a transaction; see JobStore.forget for their order.

    Args:
        bounds: Numbers of jobs and bytes to keep; None to delete expired jobs only.
    """
    await connection.execute("DELETE FROM deletions WHERE steady < %s", (float(ended_before),))
    removed = await rows_of(connection, _EXPIRED, (float(ended_before), limit))
    if bounds is not None and len(removed) < limit:
        jobs, size_bytes = await totals(connection)
        too_many, too_large_bytes = jobs - bounds[0], size_bytes - bounds[1]
        if too_many > 0 or too_large_bytes > 0:
            room = limit - len(removed)
            chosen = await _dispensable(connection, too_many=too_many, too_large_bytes=too_large_bytes, limit=room)
            removed += await rows_of(connection, _DELETE, (chosen,))
    await count_removed(connection, removed)
    return len(removed)


async def count_removed(connection: Connection, jobs: Sequence[tuple[str, float]]) -> None:
    """Count jobs of the last minute that are removed, for quotas of new jobs.

    Args:
        jobs: Tenant and time of acceptance of each.
    """
    if jobs:
        await connection.execute(_COUNT_RECENT.encode(), ([job[0] for job in jobs], [job[1] for job in jobs]))


async def _dispensable(connection: Connection, *, too_many: int, too_large_bytes: int, limit: int) -> list[int]:
    """Return the sequence numbers of the jobs to delete, up to `limit`."""
    held = {
        (finished, peer): [int(jobs), int(size_bytes)]
        for finished, peer, jobs, size_bytes in await rows_of(connection, _HELD)
    }
    oldest: dict[tuple[bool, str], deque[tuple[int, int]]] = {}
    for finished, peer, sequence, size_bytes in await rows_of(connection, _OLDEST, (limit,)):
        oldest.setdefault((finished, peer), deque()).append((sequence, size_bytes))
    chosen: list[int] = []
    while len(chosen) < limit and (too_many > 0 or too_large_bytes > 0):
        by = 0 if too_many > 0 else 1
        # Cancelled and failed jobs first, then those of the peer with most; of two equal peers, the first by name.
        holder = min(
            (key for key in held if oldest.get(key)), key=lambda key: (key[0], -held[key][by], key[1]), default=None
        )
        if holder is None:
            break  # the others have not ended
        sequence, size_bytes = oldest[holder].popleft()
        chosen.append(sequence)
        held[holder][0] -= 1
        held[holder][1] -= size_bytes
        too_many -= 1
        too_large_bytes -= size_bytes
    return chosen
