"""The jobs of a gateway, in memory and in a real store: what is found, listed, written and told."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import DataLoss, InternalError, InvalidRequest, JobNotFound, NoWorker, StorageUnavailable, TooLarge
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.jobs.store import Change, EventOf, JobFilter, JobRecord, SqliteJobStore, no_event
from bottega.gateway.jobs.stored_jobs import StoredJobs
from bottega.gateway.jobs.values import StoredImage
from bottega.storage import ContentStore, os_errors
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import Provenance
from tests.fakes.fake_time import FakeTime
from tests.samples.jobs import sample_job
from tests.support.waiting import eventually

IMAGES = (StoredImage(digest="a" * 64, size_bytes=3),)


class FailingStore(SqliteJobStore):
    """A store whose disk is full while `full`; afterwards it says what it did all the same, where `lies`."""

    full = False
    lies = False
    busy = False
    gets = 0

    async def get(self, job_id: str, *, tenant: str | None = None) -> JobRecord | None:
        self.gets += 1
        return await super().get(job_id, tenant=tenant)

    async def add(self, record: JobRecord, **values: Any) -> JobRecord:
        if self.lies:
            await super().add(record, **values)
        self._check()
        return await super().add(record, **values)

    async def update(self, job_id: str, change: Change, *, event_of: EventOf = no_event) -> bool:
        if self.lies:
            await super().update(job_id, change, event_of=event_of)
        self._check()
        return await super().update(job_id, change, event_of=event_of)

    async def probe(self) -> None:
        self._check()
        await super().probe()

    def _check(self) -> None:
        if self.busy:
            raise os_errors.unavailable("too many operations wait for the disk", cause=os_errors.BUSY)
        if self.full or self.lies:
            raise os_errors.unavailable("the disk is full", cause="ENOSPC")


@dataclass
class Life:
    """One life of a gateway, as far as its jobs go."""

    time: FakeTime
    store: FailingStore
    storage: Storage
    log: JobRepository
    stored: StoredJobs
    restored: list[Job]

    @classmethod
    async def begin(cls, folder: Path, time: FakeTime) -> Life:
        store = FailingStore(folder / "jobs.sqlite")
        storage = Storage(
            folder=folder,
            jobs=store,
            images=ContentStore(folder / "images", budget_bytes=1 << 20, ttl_s=60, clock=time.clock()),
            max_jobs=100,
            jobs_bytes=1 << 20,
            jobs_ttl_s=3600,
            waiting_bytes=1 << 20,
        )
        log = JobRepository(storage=storage, clock=time.clock())
        await storage.open()
        storage.start(log.live_records)
        stored = StoredJobs(log)
        return cls(time=time, store=store, storage=storage, log=log, stored=stored, restored=await log.restore())

    async def end(self) -> None:
        await self.log.close()
        await self.storage.close()

    async def job(self, request_id: str = "", *, prompt: str = "") -> Job:
        job = sample_job(self.time, request_id=request_id)
        job.bare.prompt = prompt
        job.life = self.log.life
        assert await self.log.add(job) is job
        return job

    async def ended(self, request_id: str = "") -> Job:
        job = await self.job(request_id)
        job.cancel()
        await self.log.finish(job)
        return job


@pytest.fixture
async def life(tmp_path: Path, time: FakeTime) -> AsyncIterator[Life]:
    life = await Life.begin(tmp_path, time)
    yield life
    await life.end()


def _ids(jobs: list[Job]) -> list[str]:
    return [job.job_id for job in jobs]


async def test_the_log_pages_newest_first_even_while_jobs_come_in(life: Life) -> None:
    jobs = [await life.ended() for _ in range(5)]
    first, token = await life.stored.page(JobFilter(), size=2, max_bytes=1 << 20, token="")
    await life.ended()
    second, token = await life.stored.page(JobFilter(), size=2, max_bytes=1 << 20, token=token)
    third, end = await life.stored.page(JobFilter(), size=2, max_bytes=1 << 20, token=token)
    assert _ids([*first, *second, *third]) == _ids(jobs[::-1])
    assert end == ""


async def test_a_page_ends_before_it_has_too_many_bytes_and_has_one_job_at_least(life: Life) -> None:
    jobs = [await life.job(prompt="x" * 1000) for _ in range(5)]
    pages: list[list[str]] = []
    token = ""
    while token or not pages:
        page, token = await life.stored.page(JobFilter(), size=9, max_bytes=2500, token=token)
        pages.append(_ids(page))
    assert [len(page) for page in pages] == [2, 2, 1]
    assert [job_id for page in pages for job_id in page] == _ids(jobs[::-1])
    alone, _ = await life.stored.page(JobFilter(), size=9, max_bytes=1, token="")
    assert _ids(alone) == pages[0][:1]


async def test_a_job_whose_record_would_be_larger_than_any_request_may_be_is_not_stored(life: Life) -> None:
    with pytest.raises(TooLarge):
        await life.job(prompt="x" * (300 << 10))
    assert (await life.stored.page(JobFilter(), size=9, max_bytes=1, token="")) == ([], "")


async def test_a_page_token_shows_no_sequence_and_outlives_a_restart(tmp_path: Path, time: FakeTime) -> None:
    life = await Life.begin(tmp_path, time)
    jobs = [await life.ended() for _ in range(3)]
    _, token = await life.stored.page(JobFilter(), size=2, max_bytes=1 << 20, token="")
    raw = base64.urlsafe_b64decode(token)
    for job in jobs:
        assert job.sequence.to_bytes(8, "big") not in raw
    await life.end()
    later = await Life.begin(tmp_path, time)
    page, _ = await later.stored.page(JobFilter(), size=2, max_bytes=1 << 20, token=token)
    assert _ids(page) == _ids(jobs[:1])
    with pytest.raises(InvalidRequest):
        await later.stored.page(JobFilter(tenant="other"), size=2, max_bytes=1 << 20, token=token)
    await later.end()


async def test_a_made_up_token_is_refused(life: Life) -> None:
    for token in ("A" * 48, "x", "AAAA", "%%%", "ü", "A" * 1000, "_" * 11 + "="):
        with pytest.raises(InvalidRequest):
            await life.stored.page(JobFilter(), size=1, max_bytes=1 << 20, token=token)


async def test_an_ended_job_is_read_as_it_was_and_is_in_memory_no_more(life: Life) -> None:
    job = await _drawn(life, IMAGES, request_id="r")
    assert job.state == image_pb2.JOB_STATE_RUNNING, "nobody hears of it before it is written"
    await life.log.finish(job)
    assert life.log.find_live(job.job_id) is None
    for read in (await life.log.get(job.job_id), await life.log.of_request("r")):
        assert read is not None
        assert (read.state, read.images, read.provenance) == (job.state, IMAGES, job.provenance)
        assert (read.steps.done, read.ended_wall, read.request.fingerprint) == (10, job.ended_wall, "f")
        assert read.ended.is_set()


async def _drawn(life: Life, images: tuple[StoredImage, ...], *, request_id: str = "") -> Job:
    """Return a job that is completed with these images, which is not written yet."""
    job = await life.job(request_id)
    job.start_attempt("w1")
    life.log.save(job)
    assert job.complete(job.number, images, Provenance(worker="w1"))
    return job


async def test_a_deletion_leaves_the_picture_of_a_job_whose_completion_is_being_written(life: Life) -> None:
    images = await life.storage.store_images([b"picture"])
    first, second = await _drawn(life, images), await _drawn(life, images)
    await life.log.finish(first)
    life.time.now += 1.0
    await life.stored.delete(first.job_id)
    await life.log.finish(second)
    assert await life.storage.images.get(images[0].digest) == b"picture"
    life.time.now += 1.0
    await life.stored.delete(second.job_id)
    assert await life.storage.images.get(images[0].digest) is None


async def test_a_deletion_leaves_what_is_to_answer_a_new_job(life: Life) -> None:
    images = await life.storage.store_images([b"picture"], [b"latents"])
    job = await _drawn(life, images)
    await life.log.finish(job)
    life.time.now += 1.0
    with life.storage.pinned(images):
        await life.stored.delete(job.job_id)
    assert all(map(life.storage.images.holds, images[0].contents))
    await life.stored.delete(job.job_id)  # as after a disk that failed between the record and the picture
    assert not any(map(life.storage.images.holds, images[0].contents))
    for tenant, job_id in (("other", job.job_id), ("", "nobody")):
        with pytest.raises(JobNotFound):
            await life.stored.delete(job_id, tenant=tenant)


async def test_a_later_life_knows_the_jobs_their_inputs_and_their_deadlines(tmp_path: Path, time: FakeTime) -> None:
    first = await Life.begin(tmp_path, time)
    queued, running = await first.job("q"), sample_job(time)
    running.deadline = time.now + 30
    await first.log.add(running)
    running.start_attempt("w1")
    first.log.save(running)
    await first.ended()
    await first.end()
    time.now += 10
    later = await Life.begin(tmp_path, time)
    one, other = later.restored
    assert (one.job_id, one.state, one.spec.image) == (queued.job_id, image_pb2.JOB_STATE_QUEUED, b"input")
    assert (other.job_id, other.state, other.number) == (running.job_id, image_pb2.JOB_STATE_RUNNING, running.number)
    assert other.deadline == pytest.approx(time.now + 20)
    assert one.age_s == pytest.approx(10)
    assert await later.log.of_request("q") is one
    assert other.requeue_returned(other.number)
    assert other.start_attempt("w2") > running.number
    assert other.attempts == 2
    await later.end()


async def test_an_end_is_told_when_the_disk_takes_it(life: Life) -> None:
    job = await _drawn(life, IMAGES)
    life.store.full = True
    ending = asyncio.create_task(life.log.finish(job))
    await eventually(lambda: isinstance(life.storage.trouble, StorageUnavailable))
    assert job.live
    life.store.full = False
    await ending
    assert job.state == image_pb2.JOB_STATE_COMPLETED
    assert await _stored_state(life, job) == image_pb2.JOB_STATE_COMPLETED


async def _stored_state(life: Life, job: Job) -> int:
    record = await life.store.get(job.job_id)
    assert record is not None
    return record.state


async def _until_stored(life: Life, job: Job, state: int) -> None:
    async def is_stored() -> bool:
        return await _stored_state(life, job) == state

    await eventually(is_stored)


async def test_an_end_that_was_written_though_that_failed_is_told_once(life: Life) -> None:
    job = await _drawn(life, IMAGES)
    await _until_stored(life, job, image_pb2.JOB_STATE_RUNNING)
    life.store.lies = True
    ending = asyncio.create_task(life.log.finish(job))
    await _until_stored(life, job, image_pb2.JOB_STATE_COMPLETED)
    life.store.lies = False
    await ending
    assert (job.state, job.images) == (image_pb2.JOB_STATE_COMPLETED, IMAGES)


async def test_an_end_that_the_store_does_not_know_of_is_no_success(life: Life) -> None:
    job = await life.job()
    job.start_attempt("w1")  # and nothing is written of it
    job.complete(job.number, IMAGES, Provenance())
    await life.log.finish(job)
    assert job.state == image_pb2.JOB_STATE_FAILED
    assert isinstance(job.error, InternalError)


async def _in_doubt(life: Life, *request_ids: str) -> list[Job]:
    """Jobs that the store has written though it said that it could not."""
    jobs = [sample_job(life.time, request_id=request_id) for request_id in request_ids]
    life.store.lies = True
    for job in jobs:
        with pytest.raises(StorageUnavailable):
            await life.log.add(job)
    life.store.lies = False
    return jobs


async def test_a_job_that_was_written_though_that_failed_goes_on_when_somebody_may_ask_for_it(life: Life) -> None:
    named, nameless = await _in_doubt(life, "r", "")
    assert life.log.find_live(named.job_id) is None
    await life.log.resolve_doubtful()
    found = await asyncio.wait_for(life.log.next_found(), 5)
    assert found.job_id == named.job_id
    assert await life.log.of_request("r") is found
    assert (await life.log.get(nameless.job_id)).state == image_pb2.JOB_STATE_CANCELLED


async def test_a_disk_that_fails_again_while_doubts_are_settled_leaves_them_for_the_next_time(life: Life) -> None:
    jobs = await _in_doubt(life, "", "", "")
    life.store.full = True
    with pytest.raises(StorageUnavailable):
        await life.log.resolve_doubtful()
    life.store.full = False
    await life.log.resolve_doubtful()
    states = [(await life.log.get(job.job_id)).state for job in jobs]
    assert states == [image_pb2.JOB_STATE_CANCELLED] * 3, "else it stays queued for ever, and nobody draws it"


async def test_a_damaged_job_is_in_the_way_of_no_other_doubt(life: Life, tmp_path: Path) -> None:
    jobs = await _in_doubt(life, "", "", "")
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.sqlite", isolation_level=None)) as file:
        file.execute("UPDATE jobs SET fingerprint = 'x' WHERE job_id = ?", (jobs[1].job_id,))
    await life.log.resolve_doubtful()
    for job in (jobs[0], jobs[2]):
        assert (await life.log.get(job.job_id)).state == image_pb2.JOB_STATE_CANCELLED
    with pytest.raises(DataLoss):
        await life.log.get(jobs[1].job_id)


async def test_what_the_disk_had_no_turn_for_is_not_looked_for_afterwards(life: Life) -> None:
    life.store.busy = True
    with pytest.raises(StorageUnavailable):
        await life.log.add(sample_job(life.time))
    life.store.busy = False
    await life.log.resolve_doubtful()
    assert life.store.gets == 0


async def test_the_same_request_at_once_gives_one_job(life: Life) -> None:
    jobs = [sample_job(life.time, request_id="r") for _ in range(10)]
    added = await asyncio.gather(*(life.log.add(job) for job in jobs))
    assert len({id(job) for job in added}) == 1
    assert len((await life.stored.page(JobFilter(), size=9, max_bytes=1 << 20, token=""))[0]) == 1


async def _swept(life: Life) -> None:
    """Return when what is to be forgotten now is forgotten."""
    await life.storage._sweep_images()
    await life.storage._forget_jobs()


@pytest.mark.parametrize("wrong_s", [-7200.0, 7200.0])
async def test_a_job_that_ended_under_a_wrong_clock_is_remembered_as_long_over_a_restart(
    tmp_path: Path, time: FakeTime, wrong_s: float
) -> None:
    life = await Life.begin(tmp_path, time)
    before = await life.ended("before")
    time.wrong_s, time.now = wrong_s, time.now + 1000
    meanwhile = await life.ended("meanwhile")
    await life.end()
    later = await Life.begin(tmp_path, time)
    time.wrong_s, time.now = 0.0, time.now + 2500  # 3500 s after the first, 2500 s after the second
    await _swept(later)
    assert (await later.log.get(before.job_id)).job_id == before.job_id
    time.now += 101
    await _swept(later)
    with pytest.raises(JobNotFound):
        await later.log.get(before.job_id)
    assert (await later.log.get(meanwhile.job_id)).job_id == meanwhile.job_id
    await later.end()


@pytest.mark.parametrize(
    ("wrong_s", "machine_restarts"), [(-7200.0, False), (7200.0, True), (400 * 86_400.0, False), (-7200.0, True)]
)
async def test_a_clock_that_jumps_between_two_lives_expires_nothing(
    tmp_path: Path, time: FakeTime, wrong_s: float, machine_restarts: bool
) -> None:
    life = await Life.begin(tmp_path, time)
    ended = await life.ended("ended")
    (picture,) = await life.storage.store_images([b"picture"])
    await life.job("waiting")
    limited = sample_job(time, request_id="limited")
    limited.deadline = time.now + 600
    assert await life.log.add(limited) is limited
    await life.end()
    if machine_restarts:
        time.restart_machine()
    time.now, time.wrong_s = time.now + 10, time.wrong_s + wrong_s
    later = await Life.begin(tmp_path, time)
    await _swept(later)
    assert (await later.log.get(ended.job_id)).job_id == ended.job_id
    assert later.storage.images.holds(picture.digest)
    left = {job.request.request_id: job.deadline for job in later.restored}
    assert left["waiting"] is None
    assert left["limited"] is not None
    assert 580 < left["limited"] - time.now < 601
    time.now += 61
    assert not later.storage.images.holds(picture.digest)
    await later.end()


async def test_of_a_cancelled_job_only_the_beginnings_of_its_texts_are_kept(life: Life) -> None:
    cancelled, failed = [await life.job(prompt="star " * 3000) for _ in range(2)]
    cancelled.cancel()
    failed.fail(NoWorker("none"))
    for job in (cancelled, failed):
        await life.log.finish(job)
    kept = await life.log.get(cancelled.job_id)
    assert kept.bare.prompt == ("star " * 3000)[:200] + "…"
    assert kept.bare == cancelled.bare, "whoever follows it is told the same"
    assert kept.request.fingerprint == cancelled.request.fingerprint
    assert (await life.log.get(failed.job_id)).bare.prompt == "star " * 3000, "it may be drawn again"
    record = await life.store.get(cancelled.job_id)
    assert record is not None
    assert len(record.spec) < 500
