"""Identical requests at the real gateway: which are answered from a stored result, and what such a job is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from bottega import errors
from bottega.v1 import fleet_pb2, generation_pb2, image_pb2
from bottega.v1.generation_pb2 import ControlNet, Provenance, Techniques
from tests.fakes.scripted_controlnet import hosted
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.running_front import png
from tests.support.running_gateway import Running, refusal, running_gateway
from tests.support.waiting import eventually

COMPLETED = image_pb2.JOB_STATE_COMPLETED
STAR: dict[str, Any] = {"prompt": "a star", "seed": 7}
BALANCED = generation_pb2.FIDELITY_BALANCED
FAST = generation_pb2.FIDELITY_FAST
PNG, OTHER_PNG = png(16, 16), png(16, 16, "red")
DRAWS = Techniques(identical_results=False)


@pytest.fixture
async def worker(house: Running) -> ScriptedWorker:
    """Its pictures differ from one request to the next."""
    return various(await house.worker())


def various(worker: ScriptedWorker) -> ScriptedWorker:
    worker.script.picture = lambda index: b"picture %d of request %d" % (index, len(worker.requests))
    return worker


async def _source(house: Running, completed: image_pb2.Completed) -> str:
    """The job that a picture was drawn by, which is the oldest here."""
    assert completed.provenance.identical_job == ""
    return (await house.listed())[-1]


async def test_an_identical_request_is_a_job_of_its_own_with_the_stored_pictures(
    house: Running, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    drawn = await house.draw(**STAR, num_images=2)
    source = await _source(house, drawn)
    events = [answer.event async for answer in house.generate(**STAR, num_images=2)]
    assert [event.WhichOneof("event") for event in events] == ["completed"]
    (event,) = events
    assert list(event.completed.images) == list(drawn.images)
    assert [image.data for image in event.completed.images] == [b"picture 0 of request 1", b"picture 1 of request 1"]
    assert len(worker.requests) == 1
    job = await house.job(event.job_id)
    assert (job.state, job.job_id != source, job.request_id) == (COMPLETED, True, "")
    assert (job.steps_done, job.HasField("start_time"), job.HasField("end_time")) == (60, False, True)
    assert await house.listed() == [job.job_id, source]
    assert await house.image(job.job_id) == b"picture 0 of request 1"
    assert (await house.ended(job.job_id)).provenance == event.completed.provenance
    lines = {line.__dict__.get("identical_job") for line in caplog.records if line.message == "job completed"}
    assert lines == {None, source}


async def test_a_job_that_is_deleted_while_its_pictures_answer_another_takes_none_of_them(
    house: Running, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await _source(house, await house.draw(**STAR))
    store = house.gateway._storage.jobs
    add = store.add

    async def add_after_a_deletion(*args: Any, **kwargs: Any) -> Any:
        await house.gateway._stored.delete(source)
        return await add(*args, **kwargs)

    monkeypatch.setattr(store, "add", add_after_a_deletion)
    job = await house.submit(**STAR)
    assert (job.state, len(worker.requests)) == (COMPLETED, 1)
    assert await house.image(job.job_id) == b"picture 0 of request 1"
    assert await house.listed() == [job.job_id]


async def test_its_provenance_is_that_of_the_drawing_with_its_own_attempts_and_times(
    house: Running, worker: ScriptedWorker
) -> None:
    drawn = await house.draw(**STAR)
    answered = await house.draw(**STAR)
    expected = Provenance()
    expected.CopyFrom(drawn.provenance)
    expected.identical_job, expected.attempts = await _source(house, drawn), 0
    del expected.times[:]
    (validated,) = answered.provenance.times
    assert (validated.stage, 0 < validated.seconds < 5) == ("validate", True)
    del answered.provenance.times[:]
    assert answered.provenance == expected
    third = await house.draw(**STAR)
    read = house.gateway.server.registry.get_sample_value
    assert [read("bottega_identical_results_total", {"outcome": of}) for of in ("answered", "none")] == [2, 1]
    assert read("bottega_jobs_total", {"outcome": "completed"}) == 3
    assert third.provenance.identical_job == expected.identical_job, "the job that drew it, not one that was answered"


async def test_a_submitted_one_is_answered_as_well_and_comes_back_for_its_request_id(
    house: Running, worker: ScriptedWorker
) -> None:
    drawn = await house.draw(**STAR)
    job = await house.submit("order-1", **STAR)
    assert (job.state, job.request_id, len(job.images)) == (COMPLETED, "order-1", 1)
    assert job.provenance.identical_job == await _source(house, drawn)
    assert await house.submit("order-1", **STAR) == job, "a request_id that is known comes first"
    assert list((await house.draw("order-1", **STAR)).images) == list(drawn.images)
    await refusal(lambda: house.generate("order-1", prompt="a square", seed=7), errors.RequestIdReused)
    cancelled = await house.images.CancelJob(image_pb2.CancelJobRequest(job_id=job.job_id))
    assert cancelled.job == job
    assert len(worker.requests) == 1


async def test_what_differs_is_drawn(house: Running, worker: ScriptedWorker) -> None:
    """Every field is another key: tests/unit/gateway/jobs/test_specs.py."""
    await house.draw(**STAR)
    for other in ({"seed": 8}, {"fidelity": BALANCED}, {"techniques": DRAWS}):
        assert (await house.draw(**{**STAR, **other})).provenance.identical_job == ""
    assert len(worker.requests) == 4


async def test_a_request_without_a_seed_is_another_picture_each_time_and_who_names_its_seed_gets_it(
    house: Running, worker: ScriptedWorker
) -> None:
    first = await house.draw(prompt="a star")
    second = await house.draw(prompt="a star", techniques=Techniques(identical_results=True))
    assert len(worker.requests) == 2
    counted = house.gateway.server.registry.get_sample_value("bottega_identical_results_total", {"outcome": "none"})
    assert counted is None, "nothing is looked for"
    for drawn in (first, second):
        seed = drawn.provenance.parameters.seed
        again = await house.draw(prompt="a star", seed=seed, fidelity=BALANCED)
        assert again.provenance.identical_job
        assert list(again.images) == list(drawn.images)
    assert len(worker.requests) == 2


async def test_a_gateway_may_draw_everything_and_a_request_may_ask_for_what_is_stored() -> None:
    async with running_gateway(identical_results=False) as house:
        worker = various(await house.worker())
        await house.draw(**STAR)
        await house.draw(**STAR)
        assert len(worker.requests) == 2
        answered = await house.draw(**STAR, techniques=Techniques(identical_results=True))
        assert answered.images[0].data == b"picture 0 of request 2", "of two results the newest"
        assert len(worker.requests) == 2


async def test_of_identical_requests_at_once_each_is_drawn(house: Running, worker: ScriptedWorker) -> None:
    """None depends on another that may be cancelled, fail or end late."""
    worker.script.hold_at = 3
    jobs = [await house.submit(**STAR) for _ in range(2)]
    worker.script.release.set()
    ended = [await house.ended(job.job_id) for job in jobs]
    assert [job.provenance.identical_job for job in ended] == ["", ""]
    assert len(worker.requests) == 2
    assert (await house.draw(**STAR)).provenance.identical_job


async def test_neither_a_full_queue_nor_a_fleet_without_workers_is_in_the_way() -> None:
    async with running_gateway(max_queued=1, codec_processes=1) as house:
        worker = various(await house.worker(step_s={2: 0.1, 4: 0.2}))
        await house.draw(**STAR)
        await house.draw(**STAR, image=PNG)
        worker.script.hold_at = 1
        for number in range(2):
            await house.submit(prompt=f"star {number}")
        await refusal(lambda: house.generate(prompt="one too many"), errors.QueueFull)
        await refusal(lambda: house.generate(**STAR, techniques=DRAWS), errors.QueueFull)
        assert (await house.submit(**STAR)).state == COMPLETED
        assert (await house.submit(**STAR, image=PNG)).state == COMPLETED
        await refusal(lambda: house.generate(**STAR, image=OTHER_PNG), errors.QueueFull)
        await worker.die()
        await eventually(
            lambda: house.gateway.server.registry.get_sample_value("bottega_members", {"kind": "worker"}) == 0
        )
        assert (await house.draw(**STAR)).provenance.identical_job


async def test_a_gateway_that_stops_takes_no_identical_request_either(house: Running, worker: ScriptedWorker) -> None:
    await house.draw(**STAR)
    house.gateway._controller.draining = True
    await refusal(lambda: house.generate(**STAR), errors.Draining)


async def test_what_was_drawn_from_another_image_answers_nobody_and_the_same_is_not_decoded_again() -> None:
    async with running_gateway(codec_processes=1) as house:
        worker = various(await house.worker())
        await house.draw(**STAR, image=PNG)
        await house.draw(**STAR, image=OTHER_PNG)
        assert len(worker.requests) == 2
        await house.gateway._codec.stop()
        answered = await house.draw(**STAR, image=PNG)
        assert answered.provenance.identical_job
        assert answered.provenance.image_digest
        assert answered.images[0].data == b"picture 0 of request 1"
        assert not answered.provenance.parameters.HasField("image")
        job = (await house.images.ListJobs(image_pb2.ListJobsRequest())).jobs[0]
        assert (job.spec.HasField("image"), job.spec.strength) == (False, 0.3)


async def test_its_pictures_stay_as_long_as_those_of_a_job_that_was_drawn() -> None:
    async with running_gateway(results_ttl_s=1000.0) as house:
        worker = various(await house.worker())
        steady = house.gateway._storage.images.steady
        await house.draw(**STAR)
        steady.go_on_from(steady() + 600.0)
        job = await house.submit(**STAR)
        steady.go_on_from(steady() + 600.0)
        assert await house.image(job.job_id) == b"picture 0 of request 1"
        steady.go_on_from(steady() + 600.0)
        assert (await house.draw(**STAR)).provenance.identical_job == "", "they have gone, and are drawn again"
        assert len(worker.requests) == 2


async def test_a_picture_that_is_damaged_on_the_disk_is_drawn_again(tmp_path: Path) -> None:
    async with running_gateway(state=str(tmp_path)) as house:
        various(await house.worker())
        first = (await house.draw(**STAR)).images[0].digest
        (tmp_path / "images" / first[:2] / first).write_bytes(b"picture 0 of request 9")
        for _ in range(2):
            assert (await house.draw(**STAR)).images[0].data == b"picture 0 of request 2"
        read = house.gateway.server.registry.get_sample_value
        assert read("bottega_identical_results_total", {"outcome": "gone"}) == 1


async def test_a_repeated_request_whose_pictures_have_gone_gets_its_own_again_and_not_those_of_another_job() -> None:
    """What was drawn approximately need not be the same twice, and its decisions are those of its first job."""
    async with running_gateway(results_bytes=100, max_result_bytes=100) as house:
        worker = await house.worker()
        worker.script.picture = lambda index: b"%060d" % len(worker.requests)
        asked: dict[str, Any] = {**STAR, "fidelity": FAST}
        await house.draw("order-1", **asked)
        await house.draw(**asked, techniques=DRAWS)
        again = await house.draw("order-1", **asked)
        assert (again.provenance.identical_job, again.images[0].data) == ("", b"%060d" % 3)


async def test_a_disk_that_cannot_be_read_is_in_the_way_of_no_drawing(
    house: Running, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.draw(**STAR)
    jobs = house.gateway._stored

    async def unreadable(result_key: str) -> list[Any]:
        raise errors.StorageUnavailable("the disk does not do what it should")

    monkeypatch.setattr(jobs, "with_result", unreadable)
    assert (await house.draw(**STAR)).provenance.identical_job == ""


def _edges(**facts: Any) -> ControlNet:
    return ControlNet(**{"name": "edges", "image": PNG, **facts})


async def test_a_request_with_controlnets_is_answered_where_their_weights_are_certain() -> None:
    async with running_gateway(codec_processes=1) as house:
        worker = various(await house.worker())
        await house.controlnets("s1", hosted("edges", digest="v1"))
        await house.draw(**STAR, controlnets=[_edges()])
        assert (await house.draw(**STAR, controlnets=[_edges()])).provenance.identical_job
        for other in (_edges(image=OTHER_PNG), _edges(controlnet_conditioning_scale=0.5), _edges(guess_mode=True)):
            assert not (await house.draw(**STAR, controlnets=[other])).provenance.identical_job
        assert len(worker.requests) == 4
        second = await house.controlnets("s2", hosted("edges", digest="v2"))
        assert not (await house.draw(**STAR, controlnets=[_edges()])).provenance.identical_job
        await second.die()
        await eventually(lambda: _is_gone(house, "s2"), "s2 to be gone")
        assert (await house.draw(**STAR, controlnets=[_edges()])).provenance.identical_job
        for _ in range(2):
            drawn = await house.draw(**STAR, controlnets=[_edges(measure_similarity=True)])
            assert drawn.provenance.controlnets[0].HasField("similarity"), "what measures is always drawn"


async def _is_gone(house: Running, gone: str) -> bool:
    answer = await house.fleet.ListMembers(fleet_pb2.ListMembersRequest())
    return gone not in {member.registration.name for member in answer.members}
