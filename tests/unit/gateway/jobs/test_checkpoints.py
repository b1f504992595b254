"""Checkpoints of running jobs in a store of objects: what the next scheduler reads, what is deleted, and failures."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from bottega.gateway.jobs import checkpoints
from bottega.gateway.jobs.checkpoints import CHECKPOINT_NAMES, SharedCheckpoints
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.values import JobCheckpoint
from bottega.storage import BlobFiles
from tests.samples.jobs import sample_job
from tests.support.waiting import eventually

_VERSIONS = {"edges": "ab" * 32}


class Scheduler:
    """The checkpoints of one scheduler after the other, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.files = BlobFiles(folder, names=CHECKPOINT_NAMES)
        self.files.clear()
        self.registry = CollectorRegistry()
        outcomes = Counter("checkpoints", "By outcome.", ("outcome",), registry=self.registry)
        self.checkpoints = SharedCheckpoints(self.files, outcomes=outcomes)

    def count(self, outcome: str) -> float:
        return self.registry.get_sample_value("checkpoints_total", {"outcome": outcome}) or 0

    def steps(self) -> list[int]:
        return sorted(int(file.name.split("-")[1]) for file in self.files.objects())

    async def note(self, job: Job, steps_done: int) -> None:
        assert job.set_checkpoint(job.number, JobCheckpoint(steps_done=steps_done, data=b"%d" % steps_done))
        self.checkpoints.store(job)
        await eventually(lambda: self.steps() == [steps_done])

    async def restored(self, *jobs: Job) -> None:
        async def read() -> list[Job]:
            return list(jobs)

        assert await self.checkpoints.restore(read(), lambda: jobs) == list(jobs)


def _job(job_id: str = "job-1", *, runs: bool = False) -> Job:
    job = sample_job()
    job.job_id = job_id
    if runs:
        job.start_attempt("w1")
    return job


async def _stored(folder: Path, job: Job) -> None:
    """Store a checkpoint after five steps of the job, by a scheduler that is gone."""
    former = Scheduler(folder)
    await former.note(job, 5)
    await former.checkpoints.close()


async def test_the_next_scheduler_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    job, former = _job(runs=True), Scheduler(tmp_path)
    for steps_done in (5, 10):
        await former.note(job, steps_done)
    await former.checkpoints.close()
    scheduler, again, other = Scheduler(tmp_path), _job(), _job("job-2")
    await scheduler.restored(again, other)
    assert again.checkpoint == JobCheckpoint(steps_done=10, data=b"10")
    assert (other.checkpoint, scheduler.count("restored")) == (None, 1)
    await scheduler.checkpoints.close()


async def test_a_checkpoint_made_with_another_controlnet_is_not_used(tmp_path: Path) -> None:
    job = _job(runs=True)
    job.use_controlnets(_VERSIONS, servers=())
    await _stored(tmp_path, job)
    scheduler, again = Scheduler(tmp_path), _job()
    await scheduler.restored(again)
    again.use_controlnets({"edges": "cd" * 32}, servers=())
    assert (again.checkpoint, scheduler.count("restored")) == (None, 1)
    await scheduler.checkpoints.close()


async def test_a_newer_checkpoint_of_the_worker_is_not_replaced(tmp_path: Path) -> None:
    await _stored(tmp_path, _job(runs=True))
    scheduler, again = Scheduler(tmp_path), _job(runs=True)
    again.set_checkpoint(again.number, JobCheckpoint(steps_done=7, data=b"7"))
    await scheduler.restored(again)
    assert again.checkpoint == JobCheckpoint(steps_done=7, data=b"7")
    await scheduler.checkpoints.close()


async def test_checkpoints_of_ended_jobs_are_deleted(tmp_path: Path) -> None:
    scheduler, job = Scheduler(tmp_path), _job(runs=True)
    await scheduler.note(job, 5)
    scheduler.checkpoints.forget(job)
    await eventually(lambda: scheduler.steps() == [])
    await scheduler.checkpoints.close()


async def test_a_sweep_leaves_checkpoints_of_live_jobs_and_young_ones(tmp_path: Path) -> None:
    writer = Scheduler(tmp_path)
    jobs = [_job(name, runs=True) for name in ("live", "ended", "young")]
    for steps_done, job in enumerate(jobs, 1):
        assert job.set_checkpoint(job.number, JobCheckpoint(steps_done=steps_done, data=b"data"))
        writer.checkpoints.store(job)
    await eventually(lambda: writer.steps() == [1, 2, 3])
    for file in writer.files.scan():
        if int(file.name.split("-")[1]) < 3:
            os.utime(file, (time.time() - 3600,) * 2)
    await writer.checkpoints.sweep(lambda: jobs[:1])
    assert writer.steps() == [1, 3]
    await writer.checkpoints.close()


async def test_a_new_scheduler_soon_deletes_checkpoints_of_ended_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkpoints._FIRST_SWEEP_S <= 600.0, "a scheduler may live for minutes"
    monkeypatch.setattr(checkpoints, "_FIRST_SWEEP_S", 0.01)
    monkeypatch.setattr(checkpoints, "_SETTLED_S", -1.0)
    await _stored(tmp_path, _job("ended", runs=True))
    scheduler = Scheduler(tmp_path)
    await scheduler.restored()
    await eventually(lambda: scheduler.steps() == [])
    await scheduler.checkpoints.close()


async def test_a_damaged_checkpoint_is_counted_and_the_job_begins_again(tmp_path: Path) -> None:
    former = Scheduler(tmp_path)
    await former.note(_job(runs=True), 5)
    (file,) = former.files.objects()
    former.files.write(file.name, b"{}\n6")
    scheduler, again = Scheduler(tmp_path), _job()
    await scheduler.restored(again)
    assert (again.checkpoint, scheduler.count("lost")) == (None, 1)
    for each in (former, scheduler):
        await each.checkpoints.close()


async def test_storage_that_fails_is_logged_once_and_delays_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scheduler, job = Scheduler(tmp_path / "files"), _job(runs=True)
    (tmp_path / "files" / "incoming").rmdir()
    for steps_done in (5, 10):
        assert job.set_checkpoint(job.number, JobCheckpoint(steps_done=steps_done, data=b"data"))
        scheduler.checkpoints.store(job)
        await eventually(lambda steps_done=steps_done: scheduler.count("failed") == steps_done // 5)  # type: ignore[misc]
    assert len(_logged(caplog, "cannot be stored")) == 1
    scheduler.files.clear()
    await scheduler.note(job, 15)
    assert len(_logged(caplog, "can be stored again")) == 1
    await scheduler.checkpoints.close()


def _logged(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.message for record in caplog.records if re.search(text, record.message)]
