"""The gateway's disk: what must be written is tried until it is, within bounds; a disk that is back is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bottega.clocks import Clock, SharedClock
from bottega.errors import BottegaError, ConfigError, DataLoss, StorageUnavailable
from bottega.gateway.jobs.conversion import WriteQueue
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.jobs.store import JobRecord, SqliteJobStore, StaleGeneration
from bottega.storage import ContentStore, os_errors
from tests.fakes.memory_storage import Shelf, memory_storage
from tests.support.job_store_backends import failed, record
from tests.support.waiting import eventually


class FailingImages(ContentStore):
    """Images on a disk that is full while `full`; probes find room all the same where `small`."""

    full = small = False

    async def put(self, digest: str, data: bytes, *, owner: str = "", job: str = "") -> None:
        if self.full:
            raise os_errors.unavailable("the disk is full", cause="ENOSPC")
        await super().put(digest, data, owner=owner, job=job)

    async def probe(self) -> None:
        if self.full and not self.small:
            raise os_errors.unavailable("the disk is full", cause="ENOSPC")
        await super().probe()


class SlowImages(ContentStore):
    """Takes one image only when it may."""

    slow = b"slow"

    def __init__(self, folder: Path, *, budget_bytes: int, ttl_s: float) -> None:
        super().__init__(folder, budget_bytes=budget_bytes, ttl_s=ttl_s)
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def put(self, digest: str, data: bytes, *, owner: str = "", job: str = "") -> None:
        if data == self.slow:
            self.reached.set()
            await self.go_on.wait()
        await super().put(digest, data, owner=owner, job=job)


def _storage(folder: Path, images: ContentStore, *, waiting_bytes: int, steady: SharedClock | None = None) -> Storage:
    return Storage(
        folder=folder,
        jobs=SqliteJobStore(folder / "jobs.sqlite"),
        images=images,
        max_jobs=3,
        jobs_bytes=1 << 20,
        jobs_ttl_s=60,
        waiting_bytes=waiting_bytes,
        steady=steady,
    )


async def _no_jobs() -> AsyncIterator[tuple[JobRecord, bytes]]:
    nothing: tuple[tuple[JobRecord, bytes], ...] = ()
    for job in nothing:
        yield job


@contextlib.asynccontextmanager
async def _running(folder: Path, *, ttl_s: float = 60.0) -> AsyncIterator[Storage]:
    """A storage whose upkeep runs. ttl_s: of its images."""
    images = FailingImages(folder / "images", budget_bytes=1 << 20, ttl_s=ttl_s)
    storage = _storage(folder, images, waiting_bytes=100)
    await storage.open()
    storage.start(_no_jobs)
    yield storage
    await storage.close()


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    async with _running(tmp_path) as storage:
        yield storage


def _images(storage: Storage) -> FailingImages:
    assert isinstance(storage.images, FailingImages)
    return storage.images


async def test_images_wait_for_a_full_disk_within_bounds(storage: Storage) -> None:
    images: FailingImages = _images(storage)
    images.full = True
    waiting = asyncio.create_task(storage.store_images([b"x" * 60]))
    await storage.changed.wait()
    storage.changed.clear()
    with pytest.raises(StorageUnavailable):
        storage.check_writable()
    with pytest.raises(StorageUnavailable):
        await storage.store_images([b"y" * 60])
    images.full = False
    (picture,) = await waiting
    assert await images.get(picture.digest) == b"x" * 60
    await storage.changed.wait()
    storage.check_writable()
    await storage.store_images([b"y" * 60])  # the room is free again


async def test_images_of_one_job_stay_together_while_others_are_kept(tmp_path: Path) -> None:
    images = SlowImages(tmp_path / "images", budget_bytes=100, ttl_s=60)
    house = _storage(tmp_path, images, waiting_bytes=1000)
    await house.open()
    try:
        keeping = asyncio.create_task(house.store_images([b"1" * 20, images.slow]))
        await images.reached.wait()
        for other in (b"2", b"3"):  # each needs what the other had
            await house.store_images([other * 60])
        with pytest.raises(StorageUnavailable):
            await house.store_images([b"4" * 81])  # more than can be pinned beside the first
        images.go_on.set()
        assert all([await images.get(picture.digest) for picture in await keeping])
    finally:
        await house.close()


async def test_what_is_kept_of_images_is_stored_with_them_and_counts_as_they_do(storage: Storage) -> None:
    images: FailingImages = _images(storage)
    with pytest.raises(StorageUnavailable):
        await storage.store_images([b"x" * 50], [b"l" * 51])
    images.full = True
    waiting = asyncio.create_task(storage.store_images([b"x", b"y"], [b"", b"latents of y"]))
    await storage.changed.wait()
    assert not waiting.done()
    images.full = False
    plain, kept = await waiting
    assert (plain.latents, plain.contents) == ("", (plain.digest,))
    assert kept.contents == (kept.digest, kept.latents)
    assert await storage.read_kept(kept.latents) == b"latents of y"
    assert await storage.read_kept("0" * 64) == b"", "gone, or never there"
    assert images.size_bytes == len(b"xylatents of y")
    assert await storage.renew_images([plain, kept])
    assert not await storage.renew_images([replace(kept, latents="0" * 64)])


async def test_a_disk_with_room_for_a_probe_only_is_still_full(storage: Storage) -> None:
    images = _images(storage)
    images.full = images.small = True
    waiting = asyncio.create_task(storage.store_images([b"x"]))
    await eventually(lambda: storage.trouble is not None)
    await asyncio.sleep(1.2)
    assert storage.trouble is not None
    images.full = False
    await waiting


async def test_a_busy_disk_is_no_broken_one(storage: Storage) -> None:
    storage.report_failure(os_errors.unavailable("too many operations wait", cause=os_errors.BUSY))
    storage.check_writable()


async def test_a_lost_lease_is_not_logged_as_a_storage_failure(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="bottega")
    storage.report_failure(StaleGeneration(7))
    storage.report_failure(StaleGeneration(7))
    await eventually(lambda: storage.trouble is None)  # the upkeep probes
    assert [record.getMessage() for record in caplog.records] == [
        "another gateway is the scheduler now; this one writes no jobs"
    ]


async def test_damage_is_told_without_saying_where(storage: Storage, tmp_path: Path) -> None:
    storage.report_failure(DataLoss(f"{tmp_path} is damaged"))
    with pytest.raises(DataLoss) as caught:
        storage.check_writable()
    assert str(tmp_path) not in caught.value.message


async def test_jobs_and_images_are_swept(tmp_path: Path) -> None:
    async with _running(tmp_path, ttl_s=0.2) as storage:
        await storage.store_images([b"x"])
        for number in range(5):
            await storage.jobs.add(record(f"j{number}"))
            await storage.jobs.update(f"j{number}", failed(ended_wall=9e9))

        async def are_swept() -> bool:
            kept = [job.job_id for job in await storage.jobs.page(size=9)]
            return kept == ["j4", "j3", "j2"] and len(storage.images) == 0

        await eventually(are_swept)


async def test_a_clock_that_jumps_an_hour_ahead_lets_no_job_be_forgotten_early(tmp_path: Path) -> None:
    now, database_s = 100.0, 5_000.0
    clock = SharedClock(monotonic=lambda: now)
    clock.set(database_s, began=now)
    images = ContentStore(tmp_path / "images", budget_bytes=1, ttl_s=60)
    storage = _storage(tmp_path, images, waiting_bytes=1, steady=clock)
    await storage.jobs.open()

    async def end(job_id: str) -> None:
        await storage.jobs.add(record(job_id))
        await storage.jobs.update(job_id, failed(ended_wall=1.0, ended_steady=clock()))

    async def kept_after(seconds: float) -> list[str]:
        nonlocal now
        now += seconds
        await storage._forget_jobs()
        return [job.job_id for job in await storage.jobs.page(size=9)]

    await end("before")
    assert await kept_after(10.0) == ["before"]
    clock.set(database_s + 3610.0, began=now)
    assert clock() == database_s + 3610.0
    await end("after")
    assert await kept_after(40.0) == ["after", "before"]
    assert await kept_after(15.0) == ["after"], "60 s have passed since its end, and 55 s since the other's"
    assert await kept_after(10.0) == []
    await storage.jobs.close()


async def test_a_start_is_tried_until_it_works_less_often_where_it_is_damaged(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.gateway.jobs.storage._DAMAGED_RETRY_S", 0.7)
    answers: list[BottegaError] = [os_errors.unavailable("it does not answer", cause="EIO"), DataLoss("damaged")]
    tries: list[float] = []
    failures: list[int] = []

    async def read() -> None:
        tries.append(time.monotonic())
        if answers:
            raise answers.pop(0)

    await storage.open(restore=read, on_failure=lambda: failures.append(1))
    assert (failures, storage.trouble) == ([1, 1], None)
    assert tries[1] - tries[0] >= 0.45
    assert tries[2] - tries[1] >= 0.7


@pytest.mark.parametrize("inside", ["", "gateway"])
async def test_a_folder_whose_name_a_file_has_is_not_waited_for(tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = tmp_path / "file" / inside
    storage = _storage(folder, ContentStore(folder / "images", budget_bytes=1, ttl_s=1), waiting_bytes=1)
    try:
        with pytest.raises(
            ConfigError, match=r"state: the folder .*file.* cannot be used: (file exists|not a directory); "
        ):
            await asyncio.wait_for(storage.open(), 5)
    finally:
        await storage.close()


async def test_a_folder_of_another_user_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = ContentStore(tmp_path / "images", budget_bytes=1, ttl_s=1)
    storage = _storage(tmp_path, images, waiting_bytes=1)

    async def refuse() -> None:
        with os_errors.translated():
            raise PermissionError(errno.EACCES, "as for another user than root")

    monkeypatch.setattr(images, "open", refuse)
    try:
        with pytest.raises(ConfigError, match="cannot be used: permission denied; change its permissions"):
            await asyncio.wait_for(storage.open(), 5)
    finally:
        await storage.close()


async def test_what_tenants_keep_is_theirs_and_latents_are_part_of_it(tmp_path: Path) -> None:
    images = ContentStore(tmp_path / "images", budget_bytes=1000, ttl_s=60)
    house = _storage(tmp_path, images, waiting_bytes=1000)
    await house.open()
    try:
        (modest,) = await house.store_images([b"m" * 100], tenant="modest")
        for number in range(9):
            (image,) = await house.store_images([b"%d" % number], [b"%d" % number * 300], tenant="greedy")
        assert (image.size_bytes, image.latents_bytes) == (1, 300)
        assert images.holds(modest.digest)
    finally:
        await house.close()


async def test_of_one_job_one_thing_is_written_after_the_other() -> None:
    queue = WriteQueue(memory_storage(Clock(), Shelf()))
    written: list[int] = []

    async def write(number: int) -> int:
        await asyncio.sleep(0.002 * (3 - number))
        written.append(number)
        return number

    queue.enqueue("a", partial(write, 0))
    queue.enqueue("a", partial(write, 1))
    assert await queue.enqueue_and_wait("a", partial(write, 2)) == 2
    assert written == [0, 1, 2]


async def test_of_what_only_the_newest_counts_no_more_waits_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers may attach to a job as often as they like while its disk is full, each with a later deadline."""
    monkeypatch.setattr("bottega.gateway.jobs.storage._RETRY_S", 0.01)
    shelf = Shelf(full=True)
    storage = memory_storage(Clock(), shelf)
    queue = WriteQueue(storage)
    tried: list[str] = []

    async def write(what: str) -> None:
        tried.append(what)
        await storage.jobs.probe()

    queue.enqueue("a", partial(write, "begun"))
    for number in range(1000):
        queue.enqueue("a", partial(write, f"until {number}"))
    ended = asyncio.create_task(queue.enqueue_and_wait("a", partial(write, "ended")))
    await asyncio.sleep(0.02)
    assert set(tried) == {"begun"}
    shelf.full = False
    await storage.jobs.open()
    await ended
    assert [*dict.fromkeys(tried)] == ["begun", "until 999", "ended"]


async def test_who_waits_for_what_a_full_disk_holds_up_is_sent_away_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.gateway.jobs.conversion._CLOSE_S", 0.01)
    shelf = Shelf(full=True)
    storage = memory_storage(Clock(), shelf)
    queue = WriteQueue(storage)
    queue.enqueue("a", storage.jobs.probe)
    waiting = [asyncio.create_task(queue.enqueue_and_wait(job_id, storage.jobs.probe)) for job_id in ("a", "a", "b")]
    await asyncio.sleep(0)
    await queue.close()
    done, _ = await asyncio.wait(waiting, timeout=1)
    assert [task.cancelled() for task in waiting] == [True, True, True], f"{len(done)} of 3 have ended"
