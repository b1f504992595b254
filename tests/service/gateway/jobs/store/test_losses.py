"""The SQLite job store when its process is killed, and when its disk is full, forbids writing, or damages the file."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import random
import shutil
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bottega.errors import ConfigError, DataLoss, StorageUnavailable
from bottega.gateway.jobs.store import JobRecord, SqliteJobStore
from bottega.gateway.jobs.values import StoredImage
from bottega.v1.image_pb2 import JOB_STATE_COMPLETED
from tests.support import full_disk
from tests.support.forked_services import start_program
from tests.support.job_store_backends import completed, failed, record, running

MIB = 1 << 20


@contextlib.asynccontextmanager
async def _open(path: Path) -> AsyncIterator[SqliteJobStore]:
    async with _closed_at_the_end(path) as store:
        await store.open()
        yield store


@contextlib.asynccontextmanager
async def _closed_at_the_end(path: Path) -> AsyncIterator[SqliteJobStore]:
    """A store that the block opens, as far as it can."""
    store = SqliteJobStore(path)
    try:
        yield store
    finally:
        await store.close()


def _killed_writer(path: Path, prefix: str, *, lines: int) -> list[list[str]]:
    """Start a writer, kill it after it has said so many lines, and return what it said was acknowledged."""
    module = "tests.support.job_store_writer"
    with contextlib.closing(start_program(module, str(path), prefix, "0", service="gateway")) as writer:
        said = b"".join(writer.output.readline() for _ in range(lines))
        writer.kill()
        said += writer.output.read()
    return [line.split() for line in said.decode().splitlines() if line.count(" ") == 1]


async def _crashed(path: Path, folder: Path) -> JobRecord:
    """Leave a file and its log as a killed process does, and return a job in them."""
    async with _open(folder / "jobs.sqlite") as store:
        job = await store.add(record("j1"))
        for number in range(20):
            await store.add(record(f"other{number}"))
        path.parent.mkdir(exist_ok=True)
        for name in ("jobs.sqlite", "jobs.sqlite-wal"):
            shutil.copy(folder / name, path.with_name(name))
    return job


async def test_what_was_acknowledged_survives_kills(tmp_path: Path) -> None:
    path, lives = tmp_path / "jobs.sqlite", (1, 30, 61, 200)
    acknowledged: dict[str, str] = {}
    for life, lines in enumerate(lives):
        said = await asyncio.to_thread(_killed_writer, path, f"life{life}", lines=lines)
        acknowledged |= {job_id: what for what, job_id in said}  # completed comes after added
    async with _open(path) as store:
        assert store.generation == len(lives) + 1
        for job_id, what in acknowledged.items():
            found = await store.get(job_id)
            assert found is not None, f"{job_id} was acknowledged and is lost"
            assert (await store.of_request(f"request of {job_id}")) == found
            if what == "completed":
                assert found.state == JOB_STATE_COMPLETED
            elif found.live:
                assert await store.inputs(job_id) == b"i" * 2000
    assert set(acknowledged.values()) == {"added", "completed"}, "no kill landed between the two"


async def test_a_full_disk_is_said_reads_go_on_and_it_heals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with full_disk.small_disk(tmp_path / "disk", size_bytes=8 * MIB) as disk:
        async with _open(disk / "jobs.sqlite") as store:
            added = await store.add(record("j1", request_id="r1"))
            ballast = full_disk.fill(disk)
            with caplog.at_level(logging.INFO):
                for number in range(3):
                    with pytest.raises(StorageUnavailable) as raised:
                        await store.add(record(f"big{number}"), inputs=bytes(MIB))
                    assert raised.value.retry_after_s is not None
                    assert str(disk) not in raised.value.message
                assert await store.get("j1") == await store.of_request("r1") == added
                assert await store.page(size=9) == [added]
                ballast.unlink()
                await store.add(record("big2"), inputs=bytes(MIB))
            said = [line.message for line in caplog.records if line.name.startswith("bottega.gateway")]
            assert said == ["the job store cannot be written", "the job store can be written again"]
        async with _open(disk / "jobs.sqlite") as store:
            assert [found.job_id for found in await store.live()] == ["j1", "big2"]
            assert len(await store.inputs("big2")) == MIB


async def test_a_start_on_a_full_disk_after_a_crash_reads_and_heals(tmp_path: Path) -> None:
    with full_disk.small_disk(tmp_path / "disk", size_bytes=8 * MIB) as disk:
        path = disk / "jobs.sqlite"
        job = await _crashed(path, tmp_path)
        ballast = full_disk.fill(disk)
        async with _closed_at_the_end(path) as store:
            with pytest.raises(StorageUnavailable):
                await store.open()
            assert await store.get("j1") == job
            with pytest.raises(StorageUnavailable):
                await store.add(record("new"))
            ballast.unlink()
            await store.open()
            assert store.generation == 2
            await store.add(record("new"))


async def test_a_start_on_a_full_disk_after_a_clean_end_reads_and_heals(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    jobs = await _filled(path)
    async with _closed_at_the_end(path) as store:
        with full_disk.files_at_most(0):  # no room even for what the readers of a file share
            for _ in range(2):
                with pytest.raises(StorageUnavailable, match="full"):
                    await store.open()
                assert await store.get("j30") == jobs[30]
                assert await store.live() == jobs
                with pytest.raises(StorageUnavailable):
                    await store.add(record("new"))
        await store.open()
        added = await store.add(record("new"))
        assert await store.live() == [*jobs, added], "what was read while it was full is not what is read now"


async def test_a_disk_that_forbids_writing_is_said_and_read_where_it_can_be(tmp_path: Path) -> None:
    with full_disk.small_disk(tmp_path / "disk", size_bytes=8 * MIB) as disk:
        path = disk / "jobs.sqlite"
        job = await _crashed(path, tmp_path)
        with full_disk.read_only(disk):
            async with _closed_at_the_end(path) as store:
                with pytest.raises(StorageUnavailable):
                    await store.open()
                assert await store.get("j1") == job
            with pytest.raises(StorageUnavailable):
                await SqliteJobStore(disk / "other" / "jobs.sqlite").open()
        async with _open(path) as healed:
            assert await healed.get("j1") == job


async def test_the_log_of_the_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    async with _open(path) as store:
        for number in range(20):
            await store.add(record(f"j{number}"), inputs=bytes(MIB))
        assert path.with_name("jobs.sqlite-wal").stat().st_size < 12 * MIB
        for number in range(20):
            await store.update(f"j{number}", failed(error=b"", ended_wall=1.0))
        for number in range(20):
            await store.add(record(f"again{number}"), inputs=bytes(MIB))
            await store.probe()
        assert path.stat().st_size < 30 * MIB, "the room of inputs that went is used again"
        assert not store.lost, "a log that begins anew is no loss"


async def test_nothing_of_a_forgotten_job_stays_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    image = StoredImage(digest="a" * 64, size_bytes=1, latents="b" * 64)
    async with _open(path) as store:
        await store.add(record("j1", request_id="r"), inputs=b"inputs")
        await store.update("j1", running(1))
        await store.update("j1", completed(1, ended_wall=1.0, images=(image,)))
        assert [job.job_id for job in await store.with_kept_picture(image.digest, limit=9)] == ["j1"]
        await store.forget(ended_before=2.0, max_jobs=9, max_bytes=MIB, limit=9)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for table in ("jobs", "request_ids", "inputs", "contents", "holders"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table


async def _filled(path: Path) -> list[JobRecord]:
    """A closed file with jobs in it."""
    async with _open(path) as store:
        return [await store.add(record(f"j{number}", request_id=f"r{number}"), inputs=b"i") for number in range(60)]


def _clear_page(path: Path, text: bytes) -> None:
    """Where the text is, in the file that may be open."""
    page = path.read_bytes().index(text) // 4096 * 4096
    with path.open("r+b") as file:
        file.seek(page)
        file.write(bytes(4096))


async def _answer(store: SqliteJobStore, job: JobRecord) -> list[JobRecord | None]:
    """What the store says about a job, by id and by request; without DataLoss."""
    answers: list[JobRecord | None] = []
    with contextlib.suppress(DataLoss):
        answers.append(await store.get(job.job_id))
    with contextlib.suppress(DataLoss):
        answers.append(await store.of_request(job.request_id))
    return answers


async def test_a_damaged_file_says_what_to_do_is_not_written_and_is_read_as_far_as_it_is_good(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    jobs = await _filled(path)
    _clear_page(path, b"spec\x00j30")
    data = path.read_bytes()
    async with _closed_at_the_end(path) as store:
        with pytest.raises(DataLoss, match=r"jobs\.sqlite is damaged.*Restore"):
            await store.open()
        for refused in (store.add(record("new")), store.update("j0", running(1, started_wall=1.0))):
            with pytest.raises(DataLoss):
                await refused
        for unsure in (store.get("unknown"), store.get("j30"), store.live(), store.page(size=5)):
            with pytest.raises(DataLoss) as raised:
                await unsure
            assert str(tmp_path) not in raised.value.message
        good = [job for job in jobs if await _answer(store, job) == [job, job]]
        assert 0 < len(good) < len(jobs)
    assert path.read_bytes() == data


async def test_every_kind_of_damage_is_noticed_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    await _filled(path)
    data = path.read_bytes()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TRIGGER jobs_forgotten")
    damaged = {
        "no trigger": path.read_bytes(),
        "header": b"x" * 100 + data[100:],
        "cut": data[: len(data) // 2],
        "empty page": data[:8192] + bytes(4096) + data[12288:],
    }
    for kind, content in damaged.items():
        path.write_bytes(content)
        async with _closed_at_the_end(path) as store:
            with pytest.raises(DataLoss, match="damaged"):
                await store.open()
            path.write_bytes(data)  # the operator restored it
            await store.open()
            assert len(await store.live()) == 60, kind


async def test_no_flipped_bits_make_a_wrong_answer(tmp_path: Path) -> None:
    source = tmp_path / "jobs.sqlite"
    jobs = await _filled(source)
    data, chance = source.read_bytes(), random.Random(11)
    refused = noticed = 0
    for number in range(20):
        path = tmp_path / f"damaged{number}.sqlite"
        damaged = bytearray(data)
        at = data.index(b"j%d" % (number % 60)) if number % 2 else chance.randrange(100, len(data))
        damaged[at] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        store = SqliteJobStore(path)
        try:
            await store.open()
        except (DataLoss, ConfigError):
            refused += 1
        for job in chance.sample(jobs, 10):
            with contextlib.suppress(StorageUnavailable):  # it could not be opened at all
                answers = await _answer(store, job)
                assert set(answers) <= {job}
                noticed += len(answers) < 2
        await store.close()
    assert refused > 2
    assert noticed


async def test_damage_that_shows_while_it_runs_stops_writing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "jobs.sqlite"
    await _filled(path)
    async with _open(path) as store:
        _clear_page(path, b"spec\x00j30")
        for _ in range(2):
            with pytest.raises(DataLoss):
                await store.get("j30")
        with pytest.raises(DataLoss):
            await store.add(record("new"))
        assert [line.levelname for line in caplog.records] == ["ERROR"]


async def test_one_damaged_job_does_not_stop_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "jobs.sqlite"
    jobs = await _filled(path)
    good = [job for job in jobs if job.job_id not in ("j30", "j40")]
    damage = path.read_bytes()
    for name in (b"j30", b"j40"):
        damage = damage.replace(b"spec\x00" + name, b"spec\x00" + b"j31")
    path.write_bytes(damage)
    async with _open(path) as store:
        assert await store.get("j31") == jobs[31]
        for hurt in (store.get("j30"), store.of_request("r30"), store.update("j30", running(1, started_wall=1.0))):
            with pytest.raises(DataLoss):
                await hurt
        for _ in range(2):
            assert await store.live() == good
            assert await store.page(size=100) == good[::-1]
        assert await store.page(size=3, before_sequence=jobs[41].sequence) == [jobs[39], jobs[38], jobs[37]]
        assert await store.update("j31", running(1, started_wall=1.0))
        assert (await store.add(record("new"))).sequence > jobs[-1].sequence
    told = [line.__dict__["sequence"] for line in caplog.records if line.levelname == "ERROR"]
    assert sorted(told) == [jobs[30].sequence, jobs[40].sequence], "of each once"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("PRAGMA user_version = 99", "later version"),
        ("PRAGMA user_version = 7", r"earlier version.*schema 7; this one has 17.*move the file away"),
        ("PRAGMA application_id = 1", "not a job store of Bottega"),
    ],
)
async def test_the_file_of_another_version_or_of_somebody_else_is_left_alone(
    tmp_path: Path, change: str, reason: str
) -> None:
    path = tmp_path / "jobs.sqlite"
    await _filled(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(change)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"jobs\.sqlite .*{reason}"):
        async with _open(path):
            pass
    assert path.read_bytes() == before


async def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "state" / "jobs.sqlite"
    async with _open(path) as store:
        await store.add(record("j1"))
        assert [part.stat().st_mode & 0o077 for part in path.parent.iterdir()] == [0, 0]
    shutil.rmtree(path.parent)


async def test_a_folder_that_another_user_owns_is_a_failure_of_the_disk_to_those_who_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "not for this user", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    async with _closed_at_the_end(tmp_path / "jobs.sqlite") as store:
        with pytest.raises(StorageUnavailable) as caught:
            await store.open_to_read()
    assert caught.value.metadata == {"cause": "EACCES"}
