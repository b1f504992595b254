"""A process that adds and completes jobs as fast as it can, and says on stdout what was acknowledged: for kills.

It never ends by itself.

Lines are "added ID" and "completed ID", each written after the store has said so.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from bottega.gateway.jobs.store import SqliteJobStore
from tests.support.job_store_backends import completed, record, running

_AT_ONCE = 16


def main() -> None:
    """Arguments: the file, a prefix of the ids, and how many jobs, 0 for no end."""
    asyncio.run(_write(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))


async def _write(path: Path, prefix: str, jobs: int) -> None:
    store = SqliteJobStore(path)
    await store.open()
    numbers = iter(range(jobs)) if jobs else itertools.count()
    await asyncio.gather(*(_fill(store, prefix, numbers) for _ in range(_AT_ONCE)))
    await asyncio.Event().wait()


async def _fill(store: SqliteJobStore, prefix: str, numbers: Iterator[int]) -> None:
    for number in numbers:
        job_id = f"{prefix}-{number}"
        await store.add(record(job_id, request_id=f"request of {job_id}"), inputs=b"i" * 2000)
        _say("added", job_id)
        await store.update(job_id, running(1, started_wall=1.0))
        if await store.update(job_id, completed(1, images=(), provenance=b"how", ended_wall=2.0)):
            _say("completed", job_id)


def _say(what: str, job_id: str) -> None:
    os.write(1, f"{what} {job_id}\n".encode())


if __name__ == "__main__":
    main()
