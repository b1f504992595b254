"""The real gateway over the wire, with workers that do what the test says: orders, jobs, images, bounds."""

from __future__ import annotations

import functools
import hashlib
import os

import grpc
import pytest

from bottega import errors
from bottega.v1 import fleet_pb2, generation_pb2, image_pb2, image_pb2_grpc
from tests.fakes.scripted_worker import MODEL
from tests.support.running_front import png
from tests.support.running_gateway import Running, refusal, running_gateway, told
from tests.support.waiting import eventually


async def test_a_picture_comes_with_place_progress_and_provenance(house: Running) -> None:
    await house.worker(step_s={2: 0.01, 4: 0.015})
    events = [answer.event async for answer in house.generate(prompt="a star", seed=7, num_images=2)]
    kinds = [event.WhichOneof("event") for event in events]
    assert (kinds[0], kinds[-1]) == ("queued", "completed")
    assert set(kinds[1:-1]) <= {"progress"}
    assert events[0].queued.place == 0
    assert events[0].queued.estimate_s == pytest.approx(30 * 0.015)
    completed = events[-1].completed
    assert [(image.index, image.seed, image.data) for image in completed.images] == [
        (0, 7, b"picture 0"),
        (1, 8, b"picture 1"),
    ]
    assert completed.images[0].digest == hashlib.sha256(b"picture 0").hexdigest()
    provenance = completed.provenance
    assert provenance.worker == "w1"
    assert (provenance.attempts, provenance.repeated_steps) == (1, 0)
    assert provenance.parameters.seed == 7
    assert provenance.parameters.sampler == generation_pb2.SAMPLER_EULER
    assert {"validate", "queue", "route"} <= {time.stage for time in provenance.times}


async def test_an_order_with_a_request_id_outlives_its_callers_deadline(house: Running) -> None:
    worker = await house.worker(hold_at=3)
    call = house.generate("order-1", timeout=6, prompt="a star")
    job_id = (await told(call)).job_id
    await refusal(lambda: call, errors.DeadlinePassed)
    assert (await house.job(job_id)).state == image_pb2.JOB_STATE_RUNNING
    worker.script.release.set()
    completed = await house.draw("order-1", prompt="a star")
    assert [image.data for image in completed.images] == [b"picture 0"]
    (request,) = worker.requests
    assert (request.request_id, request.HasField("deadline_s")) == ("order-1", False)


async def test_a_running_job_past_its_deadline_is_taken_from_its_worker(house: Running) -> None:
    worker = await house.worker(hold_at=1)
    call = house.generate(timeout=6, prompt="a star")
    job_id = (await told(call)).job_id
    assert (await worker.cancelled.get()).job_id == job_id
    assert (await house.ended(job_id)).error.code == errors.Code.DEADLINE_EXCEEDED


async def test_a_worker_says_why_a_job_fails_and_ends_every_call_itself_after_the_last_word(house: Running) -> None:
    worker = await house.worker()
    worker.script.linger_s = 0.1
    assert (await house.draw(prompt="a star")).images
    worker.script.failure = errors.TooLarge("too large", metadata={"limit": "max_rows"})
    error = await refusal(lambda: house.generate(prompt="a star"), errors.TooLarge)
    assert error.metadata == {"limit": "max_rows"}
    await eventually(lambda: worker.finished == worker.begun)


async def test_an_input_image_is_looked_at_before_anything_is_acknowledged() -> None:
    async with running_gateway(codec_processes=1, max_image_pixels=64 * 64) as house:
        worker = await house.worker()
        good = png(64, 64)
        completed = await house.draw(prompt="a star", image=good)
        assert completed.provenance.image_digest == hashlib.sha256(good).hexdigest()
        assert not completed.provenance.parameters.HasField("image")
        assert worker.requests[0].spec.image == good
        for bad in (b"no image at all", good[: len(good) // 2], png(65, 64)):
            error = await refusal(functools.partial(house.generate, image=bad), errors.BadImage)
            assert [violation.field for violation in error.violations] == ["spec.image"]
        error = await refusal(lambda: house.generate(image=b"no image", width=63, mask_image=b""))
        assert type(error) is errors.InvalidRequest
        fields = ["spec.mask_image", "spec.width", "spec.image"]
        assert [violation.field for violation in error.violations] == fields
        await refusal(lambda: house.generate(image=b"no image", model="no-such"), errors.BadImage)
        assert len(worker.requests) == 1
        assert len((await house.images.ListJobs(image_pb2.ListJobsRequest())).jobs) == 1


async def test_a_job_without_request_id_ends_when_its_caller_goes(house: Running) -> None:
    worker = await house.worker(hold_at=3)
    call = house.generate(prompt="a star")
    job_id = (await told(call)).job_id
    await worker.arrived.wait()
    call.cancel()
    cancelled = await worker.cancelled.get()
    assert (cancelled.job_id, cancelled.number) == (job_id, 1)
    assert (await house.ended(job_id)).state == image_pb2.JOB_STATE_CANCELLED


async def test_a_job_with_request_id_continues_and_is_attached_to(house: Running) -> None:
    worker = await house.worker(hold_at=3)
    first = house.generate("order-1", prompt="a star")
    job_id = (await told(first)).job_id
    await worker.arrived.wait()
    first.cancel()
    second = house.generate("order-1", prompt="a star")
    event = await told(second)
    assert (event.job_id, event.WhichOneof("event")) == (job_id, "progress")
    worker.script.release.set()
    images = [answer.event async for answer in second][-1].completed.images
    again = await house.draw("order-1", prompt="a star")
    assert list(again.images) == list(images)
    assert len(worker.requests) == 1


async def test_what_is_drawn_again_for_a_request_id_is_drawn_with_the_seed_and_the_defaults_of_then() -> None:
    async with running_gateway(results_bytes=100, max_result_bytes=100) as house:
        worker = await house.worker()
        worker.script.picture = lambda index: b"x" * 60
        first = await house.submit("order-1", prompt="a star")
        await house.ended(first.job_id)
        worker.script.picture = lambda index: b"z" * 60
        await house.draw(prompt="another that needs the room")
        await worker.die()
        other = image_pb2.Model()
        other.CopyFrom(MODEL)
        other.default_steps, other.default_guidance_scale = 12, 7.5
        worker = await house.worker("w2", model=other)
        worker.script.picture = lambda index: b"y" * 60
        again = await house.submit("order-1", prompt="a star")
        assert again.job_id != first.job_id
        assert again.spec == first.spec
        (image,) = (await house.draw("order-1", prompt="a star")).images
        assert image.data == b"y" * 60
        assert worker.requests[0].spec == first.spec
        fresh = await house.submit("order-2", prompt="a star")
        assert fresh.spec.num_inference_steps == 12
        worker.script.picture = lambda index: b"z" * 101
        await refusal(lambda: house.generate(prompt="more than is kept of one job"), errors.TooLarge)


async def test_large_images_are_fetched_in_chunks(house: Running) -> None:
    worker = await house.worker()
    data = bytes(range(256)) * 4096 * 3
    worker.script.picture = lambda index: data
    completed = await house.draw(prompt="a star")
    (image,) = completed.images
    assert (image.data, image.size_bytes) == (b"", len(data))
    (job,) = (await house.images.ListJobs(image_pb2.ListJobsRequest())).jobs
    answers = [a async for a in house.images.GetImage(image_pb2.GetImageRequest(job_id=job.job_id))]
    assert b"".join(answer.chunk for answer in answers) == data
    assert max(len(answer.chunk) for answer in answers) == 256 << 10
    assert answers[0].image.digest == hashlib.sha256(data).hexdigest()
    assert not any(answer.HasField("image") for answer in answers[1:])


async def test_an_image_that_is_not_there_is_said_to_be_so(house: Running) -> None:
    worker = await house.worker(hold_at=1)
    job = await house.submit(prompt="a star")

    async def get(job_id: str, index: int = 0) -> errors.BottegaError:
        return await refusal(lambda: house.images.GetImage(image_pb2.GetImageRequest(job_id=job_id, index=index)))

    assert isinstance(await get("unknown"), errors.JobNotFound)
    assert isinstance(await get(job.job_id), errors.JobNotFinished)
    worker.script.release.set()
    await house.ended(job.job_id)
    for index in (1, -1):
        assert isinstance(await get(job.job_id, index), errors.ImageNotFound)


async def test_a_cancelled_job_stops_its_worker_and_says_so_to_everybody(house: Running) -> None:
    worker = await house.worker(hold_at=1)
    caller = house.generate("order-1", prompt="a star")
    job_id = (await told(caller)).job_id
    watch = house.images.WatchJob(image_pb2.WatchJobRequest(job_id=job_id))
    await told(watch)
    await worker.arrived.wait()
    answer = await house.images.CancelJob(image_pb2.CancelJobRequest(job_id=job_id))
    assert answer.job.state == image_pb2.JOB_STATE_CANCELLED
    assert (await worker.cancelled.get()).job_id == job_id
    await refusal(lambda: caller, errors.JobCancelled)
    assert [a.event async for a in watch][-1].failed.code == errors.Code.CANCELLED
    again = await house.images.CancelJob(image_pb2.CancelJobRequest(job_id=job_id))
    assert again.job == answer.job


async def test_a_deleted_job_is_gone_with_its_pictures_trace_and_request_id(house: Running) -> None:
    worker = await house.worker()
    worker.script.picture = lambda index: b"picture %d of request %d" % (index, len(worker.requests))
    first = await house.draw("order-1", prompt="a star", seed=7)
    job_id = (await house.submit("order-1", prompt="a star", seed=7)).job_id
    again = await house.submit(prompt="a star", seed=7)  # completed by the same stored pictures
    images, stored = house.images, house.gateway._storage.images

    def delete(job_id: str) -> grpc.aio.UnaryUnaryCall[image_pb2.DeleteJobRequest, image_pb2.DeleteJobResponse]:
        return images.DeleteJob(image_pb2.DeleteJobRequest(job_id=job_id), timeout=60)

    await delete(job_id)
    await refusal(lambda: images.GetJob(image_pb2.GetJobRequest(job_id=job_id), timeout=60), errors.JobNotFound)
    await delete(job_id)  # a caller that has lost the answer asks once more
    await refusal(lambda: delete(job_id[::-1]), errors.JobNotFound)
    assert await house.image(again.job_id) == b"picture 0 of request 1", "another job has it as well"
    await delete(again.job_id)
    assert not stored.holds(first.images[0].digest)
    assert await house.listed() == []
    assert (await house.draw("order-1", prompt="a star", seed=7)).images[0].digest != first.images[0].digest
    worker.script.hold_at = 1
    running = (await house.submit(prompt="a square")).job_id
    await refusal(lambda: delete(running), errors.JobNotFinished)
    assert (await house.job(running)).state in (image_pb2.JOB_STATE_QUEUED, image_pb2.JOB_STATE_RUNNING)
    worker.script.release.set()


async def test_a_page_of_large_jobs_ends_early_enough_for_any_client_and_goes_on_with_its_token(house: Running) -> None:
    worker = await house.worker()
    worker.script.picture = lambda index: os.urandom(64)
    long = "x" * (16 << 10)
    texts = {"prompt": long, "prompt_2": long, "negative_prompt": long, "negative_prompt_2": long}
    ids = [(await house.submit(num_inference_steps=1, **texts)).job_id for _ in range(50)]
    for job_id in ids:
        await house.ended(job_id)
    listed: list[str] = []
    token, pages = "", 0
    async with grpc.aio.insecure_channel(house.address) as channel:  # with gRPC's own limits
        images: image_pb2_grpc.ImageServiceAsyncStub = image_pb2_grpc.ImageServiceStub(channel)
        while token or not pages:
            page = await images.ListJobs(image_pb2.ListJobsRequest(page_size=100, page_token=token))
            assert page.ByteSize() < 3 << 20
            listed += [job.job_id for job in page.jobs]
            token, pages = page.next_page_token, pages + 1
    assert listed == ids[::-1]
    assert 1 < pages < 10


async def test_the_backlog_is_told_to_the_worker(house: Running) -> None:
    worker = await house.worker(step_s={2: 0.1, 4: 0.2}, hold_at=1)
    jobs = [await house.submit(prompt=f"star {number}") for number in range(3)]
    await eventually(lambda: worker.backlogs[-1:] == [2])
    await house.images.CancelJob(image_pb2.CancelJobRequest(job_id=jobs[2].job_id))
    await eventually(lambda: worker.backlogs[-1:] == [1])


async def test_previews_come_to_whoever_asks_for_them_while_the_job_runs(house: Running) -> None:
    worker = await house.worker(step_s={2: 0.01, 4: 0.01})
    worker.script.preview, worker.script.pace_s, worker.script.hold_at = b"jpeg", 0.02, 3
    watched = await house.submit(prompt="a star")
    await house.submit("attached", prompt="a square")
    await eventually(lambda: len(worker.requests) == 2)
    assert not any(request.preview for request in worker.requests)
    watching = house.images.WatchJob(image_pb2.WatchJobRequest(job_id=watched.job_id, preview=True), timeout=20)
    attached = house.generate("attached", preview=True, prompt="a square")
    for call in (watching, attached):
        await told(call)
        await eventually(lambda: len(worker.previewed) == 2)
        worker.script.release.set()
        events = [answer.event async for answer in call]
        assert {preview.jpeg for event in events for preview in event.progress.previews} == {b"jpeg"}
        assert events[-1].HasField("completed")
    plain = [a.event async for a in house.generate(prompt="a circle")]
    assert not any(event.progress.previews for event in plain)


async def test_models_and_members_are_listed(house: Running) -> None:
    await house.worker("w1")
    await house.worker("w2")
    (model,) = (await house.images.ListModels(image_pb2.ListModelsRequest())).models
    assert (model.name, model.workers, model.size_multiple) == ("miniature", 2, 8)
    members = (await house.fleet.ListMembers(fleet_pb2.ListMembersRequest())).members
    assert [member.registration.name for member in members] == ["gateway", "w1", "w2"]
    assert members[0].registration.address == house.address
    assert members[0].load.memory_bytes > 10 << 20


async def test_metrics_tell_outcomes_refusals_and_members(house: Running) -> None:
    await house.worker()
    await house.draw(prompt="a star")
    await refusal(lambda: house.generate(width=-1))
    read = house.gateway.server.registry.get_sample_value
    assert read("bottega_jobs_total", {"outcome": "completed"}) == 1
    assert read("bottega_refused_total", {"reason": "INVALID_REQUEST"}) == 1
    assert read("bottega_members", {"kind": "worker"}) == 1
    assert read("bottega_queued_jobs") == 0
    assert read("bottega_job_seconds_count") == 1
    assert (read("bottega_running_jobs"), read("bottega_longest_wait_seconds")) == (0, 0)
    assert 0 < (read("bottega_image_bytes") or 0) < (read("bottega_image_budget_bytes") or 0)
    assert read("bottega_store_in_trouble") == 0
    assert read("bottega_route_seconds_count") == 1
    activity = (await house.fleet.ListMembers(fleet_pb2.ListMembersRequest())).members[0].load.activity
    assert (activity.completed, activity.failed, activity.routed) == (1, 0, 1)
    assert activity.waited_s == pytest.approx(read("bottega_queue_seconds_sum"))


async def test_metrics_tell_what_runs_what_waits_and_why_jobs_did_not_complete(house: Running) -> None:
    await house.worker(hold_at=1)
    read = house.gateway.server.registry.get_sample_value
    jobs = [await house.submit(prompt="a star") for _ in range(40)]  # more than a worker takes
    await eventually(lambda: (read("bottega_longest_wait_seconds") or 0) > 0.05, "some to wait")
    running, waiting = read("bottega_running_jobs") or 0, read("bottega_queued_jobs") or 0
    assert min(running, waiting) > 0
    assert running + waiting == len(jobs)
    for job in jobs:
        await house.images.CancelJob(image_pb2.CancelJobRequest(job_id=job.job_id))
    aborted = {"reason": "job_cancelled"}
    await eventually(lambda: read("bottega_jobs_aborted_total", aborted) == len(jobs), "all to be counted")
    assert read("bottega_job_seconds_count") == 0
    await eventually(lambda: read("bottega_running_jobs") == 0, "the worker to be free")
