"""The SQLite job store when its files are deleted, replaced or truncated while it is open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from bottega.errors import StorageUnavailable
from bottega.gateway.jobs.store import JobRecord, SqliteJobStore
from tests.support import lost_files
from tests.support.job_store_backends import failed, record, running

MOVES = [
    lost_files.unlink,
    lost_files.unlink_all,
    lost_files.unlink_log,
    lost_files.replace_by_nothing,
    lost_files.replace_by_another,
    lost_files.remove_folder,
]
CUTS = [lost_files.truncate, lost_files.truncate_log, lost_files.truncate_all]


@contextlib.asynccontextmanager
async def _open(path: Path) -> AsyncIterator[SqliteJobStore]:
    store = SqliteJobStore(path)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


async def _heal(store: SqliteJobStore, live: list[JobRecord]) -> None:
    async def jobs() -> AsyncIterator[tuple[JobRecord, bytes]]:
        for job in live:
            yield job, b"inputs"

    await store.remake(jobs())
    await store.probe()


@pytest.mark.parametrize(
    ("lose", "large"),
    [*((lose, False) for lose in (*MOVES, *CUTS)), *((lose, True) for lose in CUTS[:2])],
)
async def test_no_job_is_acknowledged_in_vain_when_the_files_go(
    tmp_path: Path, lose: Callable[[Path], None], large: bool
) -> None:
    path = tmp_path / "state" / "jobs.sqlite"
    acknowledged: list[JobRecord] = []
    async with _open(path) as store:
        for number in range(100 if large else 5):
            spec = bytes(60_000) if large else b""
            acknowledged.append(await store.add(record(f"j{number}", request_id=f"r{number}", spec=spec)))
        acknowledged[1:2] = []
        await store.update("j1", failed(ended_wall=1.0))
        lose(path)
        retries: list[float | None] = []
        for number in range(20):
            try:
                acknowledged.append(await store.add(record(f"new{number}", request_id=f"n{number}")))
            except StorageUnavailable as error:
                retries.append(error.retry_after_s)
                await _heal(store, acknowledged)
        assert None not in retries
        assert len(retries) == 1, "what happened was not noticed before a job was acknowledged"
        assert await store.page(size=1000) is not None
    async with _open(path) as again:
        assert again.generation == 2
        missing = [job.job_id for job in acknowledged if await again.get(job.job_id) != job]
        assert not missing
        assert (await again.of_request("r2")) == acknowledged[1]
        if lose in MOVES:
            assert await again.get("j1") is not None, "what had ended is kept as well"
            assert await again.inputs("j2") == b""
        sequences = [job.sequence for job in await again.live()]
        assert sorted(set(sequences)) == sequences


@pytest.mark.parametrize("lose", [lost_files.unlink, lost_files.replace_by_nothing, lost_files.truncate_all])
async def test_a_store_at_rest_notices_with_its_next_sweep(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    path = tmp_path / "state" / "jobs.sqlite"
    async with _open(path) as store:
        job = await store.add(record("j1"))
        await store.update("j1", running(1))
        lose(path)
        with pytest.raises(StorageUnavailable):
            await store.forget(ended_before=0.0, max_jobs=9, max_bytes=1 << 30, limit=9)
        await _heal(store, [job])
        assert await store.get("j1") is not None


async def test_what_has_the_name_of_the_file_is_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    async with _open(path) as store:
        await store.add(record("j1"))
        lost_files.replace_by_another(path)
        with pytest.raises(StorageUnavailable):
            await store.probe()
        await store.probe()
    (aside,) = [part for part in tmp_path.iterdir() if part.match("jobs.aside-*.sqlite")]  # noqa: ASYNC240
    assert aside.read_bytes().startswith(b"another file")


async def test_nothing_that_others_can_truncate_is_mapped_into_the_process(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    async with _open(path) as store:
        await store.add(record("j1"))
        assert await store.get("j1") is not None
        mapped = await asyncio.to_thread(Path("/proc/self/maps").read_text, encoding="utf-8")
        assert str(tmp_path) not in mapped
