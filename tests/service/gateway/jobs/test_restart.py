"""What a later life of a gateway knows of an earlier one: jobs, pictures, attempts at workers; and disks that fail."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

from bottega import errors
from bottega.gateway.jobs.repository import JobRepository
from bottega.storage import ContentStore
from bottega.v1 import generation_pb2, image_pb2
from tests.fakes.scripted_worker import MODEL
from tests.samples.jobs import sample_job
from tests.support import full_disk
from tests.support.running_front import png
from tests.support.running_gateway import Running, refusal, running_gateway, told
from tests.support.waiting import eventually

MIB = 1 << 20


async def test_the_same_request_gives_the_same_bytes_after_a_restart_and_another_one_is_refused(tmp_path: Path) -> None:
    async with running_gateway(state=str(tmp_path)) as house:
        await house.worker()
        first = await house.draw("order-1", prompt="a star")
        read = house.gateway.server.registry.get_sample_value
        assert read("bottega_jobs_acknowledged_total") == 1
        assert (read("bottega_store_commit_seconds_count") or 0) >= 3  # opened, taken, ended
    async with running_gateway(state=str(tmp_path)) as house:
        again = await house.draw("order-1", prompt="a star")  # nobody is here who could draw it
        assert list(again.images) == list(first.images)
        assert again.provenance == first.provenance
        await refusal(lambda: house.generate("order-1", prompt="a square"), errors.RequestIdReused)
        (job,) = (await house.images.ListJobs(image_pb2.ListJobsRequest())).jobs
        assert (job.state, job.request_id) == (image_pb2.JOB_STATE_COMPLETED, "order-1")
        assert await house.image(job.job_id) == b"picture 0"


async def test_a_stopping_gateway_leaves_what_it_cannot_finish_to_a_later_life(tmp_path: Path) -> None:
    async with running_gateway(state=str(tmp_path), drain_grace_s=0.5) as house:
        address, worker = house.fleet_address, await house.worker(hold_at=5)
        runs = house.generate("order-1", prompt="a star")
        job_id = (await told(runs)).job_id
        await worker.arrived.wait()
        waits = house.generate("order-2", prompt="a square")
        await told(waits)
        house.workers.clear()
        await house.stop_early()
        for call in (runs, waits):
            assert isinstance(await refusal(lambda call=call: call), errors.Draining)  # type: ignore[misc]
    worker.script.release.set()
    async with running_gateway(state=str(tmp_path), fleet={"listen": address}) as house:
        house.workers.append(worker)
        done = await house.draw("order-1", prompt="a star")
        assert done.provenance.attempts == 1
        await house.draw("order-2", prompt="a square")
        assert [job_id for job_id, _ in worker.begun].count(job_id) == 1
        assert len(worker.begun) == 2


async def test_an_adopted_attempt_brings_its_checkpoint_along(tmp_path: Path) -> None:
    async with running_gateway(state=str(tmp_path), drain_grace_s=0.2) as house:
        address, worker = house.fleet_address, await house.worker(hold_at=20)
        job = await house.submit(prompt="a star")
        await worker.arrived.wait()
        await house.until_checkpoint(worker, job.job_id)
        house.workers.clear()
        await house.stop_early()
    async with running_gateway(state=str(tmp_path), fleet={"listen": address}) as house:
        await eventually(lambda: len(worker.requests) == 2, "the attempt to be adopted")
        await eventually(lambda: getattr(house.gateway._jobs.find_live(job.job_id), "checkpoint", None) is not None)
        other = await house.worker("w2")
        await worker.die()
        assert (await house.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED
        assert [request.checkpoint for request in other.requests] == [b"15"]


async def test_what_nobody_claims_after_a_restart_lines_up_again_before_the_others(tmp_path: Path) -> None:
    async with running_gateway(state=str(tmp_path), drain_grace_s=0.2) as house:
        worker = await house.worker(hold_at=5)
        runs = await house.submit(prompt="a star")
        await worker.arrived.wait()
        waits = await house.submit(prompt="a square")
        await house.stop_early()
    async with running_gateway(state=str(tmp_path), hold_s=0.5, model_grace_s=100) as house:
        await asyncio.sleep(0.6)
        other = await house.worker("w2")
        assert (await house.ended(waits.job_id)).state == image_pb2.JOB_STATE_COMPLETED
        ended = await house.ended(runs.job_id)
        assert (ended.state, ended.provenance.attempts) == (image_pb2.JOB_STATE_COMPLETED, 2)
        assert [job_id for job_id, _ in other.begun] == [runs.job_id, waits.job_id]


async def test_who_watches_a_job_that_waits_hears_at_once_after_a_restart_where_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.gateway.periodic_checks._QUEUE_S", 600.0)  # nobody is told by the next look
    async with running_gateway(state=str(tmp_path)) as house:
        await (await house.worker()).die()
        jobs = [await house.submit(prompt=f"star {number}") for number in range(2)]
        await house.stop_early()
    async with running_gateway(state=str(tmp_path)) as house:
        for place, job in enumerate(jobs):
            watch = house.images.WatchJob(image_pb2.WatchJobRequest(job_id=job.job_id), timeout=60)
            event = await told(watch)
            assert event.WhichOneof("event") == "queued"
            assert event.queued.place == place
            watch.cancel()


async def test_a_job_has_as_many_steps_after_a_restart_as_before(tmp_path: Path) -> None:
    """Strength skips no step of LCM, and a step takes two evaluations, which only the model's workers say."""
    model = image_pb2.Model()
    model.CopyFrom(MODEL)
    model.strength_keeps_steps, model.default_sampler = True, generation_pb2.SAMPLER_LCM
    model.sampler_choices.add(sampler=generation_pb2.SAMPLER_LCM, is_default=True, evaluations_per_step=2)
    async with running_gateway(codec_processes=1, state=str(tmp_path)) as house:
        await (await house.worker(model=model)).die()
        job = await house.submit(prompt="a star", image=png(64, 64), strength=0.25, num_inference_steps=8)
        before = house.gateway._jobs.find_live(job.job_id)
        await house.stop_early()
    async with running_gateway(codec_processes=1, state=str(tmp_path)) as house:
        after = house.gateway._jobs.find_live(job.job_id)
        assert after is not None
        assert before is not None
        assert after.steps.total == before.steps.total == 8
        assert after.request.evaluations_per_step == before.request.evaluations_per_step == 2


async def test_who_gave_no_request_id_is_drawn_nothing_after_a_crash(tmp_path: Path) -> None:
    async with running_gateway(state=str(tmp_path), drain_grace_s=0.2) as house:
        address, worker = house.fleet_address, await house.worker(hold_at=5)
        house.workers.clear()
        calls = [house.generate(prompt="nobody's")]
        nobodys = (await told(calls[0])).job_id
        await worker.arrived.wait()  # that one is with the worker, and no other
        calls.append(house.generate("order-1", prompt="somebody's"))
        somebodys = (await told(calls[1])).job_id
        submitted = (await house.submit(prompt="anybody's")).job_id
        # As at a crash: the gateway will not be there to hear that callers have gone.
        house.gateway._controller.abandon = lambda job, why="": None  # type: ignore[method-assign]
        await house.stop_early()
    try:
        async with running_gateway(state=str(tmp_path), fleet={"listen": address}) as house:
            ended = await house.ended(nobodys)
            assert (ended.state, ended.error.reason) == (image_pb2.JOB_STATE_CANCELLED, errors.JobCancelled.reason)
            assert ended.error.message == "its only caller was disconnected when the gateway restarted"
            worker.script.release.set()
            for job_id in (somebodys, submitted):
                assert (await house.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED
            assert (await worker.cancelled.get()).job_id == nobodys
    finally:
        await worker.die()


async def test_a_full_disk_refuses_jobs_keeps_what_was_drawn_and_heals(tmp_path: Path) -> None:
    with full_disk.small_disk(tmp_path / "disk", size_bytes=4 * MIB) as disk:
        async with running_gateway(state=str(disk / "state")) as house:
            worker = await house.worker()
            worker.script.picture = lambda index: bytes(300_000)
            done = await house.submit(prompt="done")
            await house.ended(done.job_id)
            worker.script.hold_at = 5
            worker.script.picture = lambda index: b"x" * 300_000
            call = house.generate("order-1", prompt="a star")
            job_id = (await told(call)).job_id
            ballast = full_disk.fill(disk)
            worker.script.release.set()
            await house.until_serving(False)
            error = await refusal(lambda: house.generate("order-2", prompt="a square"), errors.StorageUnavailable)
            assert error.retry_after_s
            assert (await house.job(job_id)).state == image_pb2.JOB_STATE_RUNNING
            assert await house.image(done.job_id) == bytes(300_000), "what is there can be read"
            assert len(await house.listed()) == 2
            ballast.unlink()
            events = [answer.event async for answer in call]
            assert events[-1].completed.images[0].data == b"x" * 300_000
            assert events[-1].completed.provenance.attempts == 1
            await house.until_serving()
            worker.script.picture = lambda index: b"small"
            await house.draw("order-2", prompt="a square")


async def test_images_that_cannot_be_used_keep_nobody_from_reading_jobs(tmp_path: Path) -> None:
    done = await _left_by_a_crash(tmp_path / "killed", tmp_path / "state")
    other = ContentStore(tmp_path / "state" / "images", budget_bytes=MIB, ttl_s=60)
    await other.open()
    try:
        async with running_gateway(state=str(tmp_path / "state"), starting=True) as house:
            await _read(house, done.job_id)
            await refusal(lambda: house.image(done.job_id), errors.StorageUnavailable)
            await house.images.CancelJob(image_pb2.CancelJobRequest(job_id=done.job_id))  # it has ended, and stays so
            assert _generation(tmp_path / "state") == 1, "two gateways must not both count themselves in"
            await other.close()
            await house.until_serving()
            assert _generation(tmp_path / "state") == 2
    finally:
        await other.close()


async def _left_by_a_crash(killed: Path, state: Path) -> image_pb2.Job:
    """A job that was drawn, in the state of a gateway that was killed while it wrote another picture."""
    async with running_gateway(state=str(killed)) as house:
        await house.worker()
        done = await house.submit(prompt="done")
        await house.ended(done.job_id)
        shutil.copytree(killed, state)
    (state / "images" / "incoming" / ("f" * 64)).write_bytes(b"half")
    return done


async def _read(house: Running, job_id: str) -> None:
    assert (await house.job(job_id)).state == image_pb2.JOB_STATE_COMPLETED
    assert await house.listed() == [job_id]


def _generation(state: Path) -> int:
    with contextlib.closing(sqlite3.connect(state / "jobs.sqlite")) as store:
        ((number,),) = store.execute("SELECT number FROM generation")
    return int(number)


async def test_a_cancel_that_is_refused_while_it_starts_on_a_full_disk_has_not_happened(tmp_path: Path) -> None:
    with full_disk.small_disk(tmp_path / "disk", size_bytes=8 * MIB) as disk:
        state = disk / "state"
        async with running_gateway(state=str(tmp_path / "killed")) as house:
            await (await house.worker()).die()
            job_id = (await house.submit("order-1", prompt="a star")).job_id
            shutil.copytree(tmp_path / "killed", state)  # as it is left by one that is killed
        ballast = full_disk.fill(disk)
        async with running_gateway(state=str(state), starting=True) as house:
            cancel = image_pb2.CancelJobRequest(job_id=job_id)
            await refusal(lambda: house.images.CancelJob(cancel, timeout=10), errors.StorageUnavailable)
            assert not await house.is_serving()
            ballast.unlink()
            await house.until_serving()
            await asyncio.sleep(0.7)  # what waited for the disk has been tried again
            worker = await house.worker("w2")
            for request_id in ("order-1", "order-2"):
                assert (await house.draw(request_id, prompt="a star")).images
            assert worker.begun[0][0] == job_id


async def test_a_damaged_store_takes_no_job_and_gives_no_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.gateway.jobs.storage._DAMAGED_RETRY_S", 0.5)
    async with running_gateway(state=str(tmp_path / "state")) as house:
        await house.worker()
        done = await house.submit("order-1", prompt="done")
        await house.ended(done.job_id)
    whole = tmp_path / "state" / "jobs.sqlite"
    shutil.copy(whole, tmp_path / "copy")
    whole.write_bytes(bytes(4096) + whole.read_bytes()[4096:])
    async with running_gateway(state=str(tmp_path / "state"), starting=True) as house:
        for call in (lambda: house.job(done.job_id), house.listed, lambda: house.submit("order-1", prompt="done")):
            error = await refusal(call, errors.DataLoss)
            assert str(tmp_path) not in error.message
        assert not await house.is_serving()
        for beside in (tmp_path / "state").glob("jobs.sqlite*"):
            beside.unlink()
        shutil.copy(tmp_path / "copy", whole)
        await house.until_serving()
        assert (await house.job(done.job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def test_a_picture_that_was_seen_damaged_does_not_keep_its_request_from_being_drawn_again(tmp_path: Path) -> None:
    async with running_gateway(state=str(tmp_path)) as house:
        worker = await house.worker()
        first = await house.submit("order-1", prompt="a star")
        await house.ended(first.job_id)
        (stored,) = (file for file in (tmp_path / "images").rglob("*") if file.is_file())
        stored.write_bytes(b"no picture")
        await refusal(lambda: house.image(first.job_id), errors.DataLoss)
        again = await house.draw("order-1", prompt="a star")
        assert [image.data for image in again.images] == [b"picture 0"]
        assert len(worker.begun) == 2


async def test_one_damaged_job_keeps_neither_the_gateway_from_starting_nor_the_others_from_their_callers(
    tmp_path: Path,
) -> None:
    async with running_gateway(state=str(tmp_path), codec_processes=1) as house:
        await (await house.worker()).die()
        hurt = await house.submit("order-1", prompt="hurt")
        unfed = await house.submit("order-2", prompt="unfed", image=png(64, 64), strength=0.5)
        well = await house.submit("order-3", prompt="well")
        await house.stop_early()
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as store, store:
        store.execute("UPDATE jobs SET deaths = deaths + 1 WHERE job_id = ?", [hurt.job_id])
        store.execute("UPDATE inputs SET data = x'00'")
    async with running_gateway(state=str(tmp_path)) as house:
        ended = await house.ended(unfed.job_id)
        assert (ended.state, ended.error.reason) == (image_pb2.JOB_STATE_FAILED, errors.DataLoss.reason)
        await house.worker()
        assert (await house.ended(well.job_id)).state == image_pb2.JOB_STATE_COMPLETED
        await refusal(lambda: house.job(hurt.job_id), errors.DataLoss)
        await refusal(lambda: house.submit("order-1", prompt="hurt"), errors.DataLoss)
        assert await house.listed() == [well.job_id, unfed.job_id]
        assert await house.is_serving()
        await house.draw("order-4", prompt="new")


async def test_a_gateway_that_cannot_look_after_its_queue_does_not_say_that_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bottega.gateway.periodic_checks._QUEUE_S", 0.05)
    monkeypatch.setattr("bottega.gateway.periodic_checks._FAULTS_S", 2.0)
    async with running_gateway() as house:
        await house.worker()
        unknown = sample_job()
        unknown.spec.model = unknown.bare.model = "miniature"
        house.gateway._controller.queue.add(unknown)  # nobody knows of it, which is a fault of ours
        await house.until_serving(False)
        house.gateway._controller.queue.remove(unknown)
        await house.until_serving()


async def test_a_fault_while_doubts_are_settled_is_logged_and_health_is_told_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(_: object) -> None:
        monkeypatch.undo()  # the next look succeeds
        raise ValueError("what no store should raise")

    monkeypatch.setattr(JobRepository, "resolve_doubtful", broken)
    async with running_gateway() as house:
        await eventually(lambda: any(line.exc_info for line in caplog.records))
        await house.gateway.server.set_serving(False)
        await house.until_serving()
    assert [line.levelname for line in caplog.records if line.exc_info] == ["ERROR"]
