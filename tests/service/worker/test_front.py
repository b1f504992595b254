"""What the worker's front does for attempts, between a real gRPC server and an engine that follows a script."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
import pytest_asyncio
from google.protobuf import json_format
from PIL import Image

from bottega.errors import ModelNotFound, StaleAttempt
from bottega.rpc.status import from_rpc_error
from bottega.v1 import error_pb2, generation_pb2, worker_pb2
from tests.fakes.scripted_engine import LATENTS
from tests.support.running_front import CONFIG, Running, images, kinds, png, request, running_workers
from tests.support.waiting import eventually

# One worker for all tests here.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with running_workers() as start:
        yield await start()


async def test_an_attempt_is_drawn_encoded_and_inscribed(running: Running) -> None:
    order = request("a flat colour, 星")
    order.spec.num_images = 2
    began_s = time.monotonic()
    events = await running.events(order)
    took_s = time.monotonic() - began_s
    assert kinds(events)[0] == "started"
    assert kinds(events)[-1] == "completed"
    pictures = images(events)
    assert sorted(pictures) == [0, 1]
    for index, data in pictures.items():
        with Image.open(io.BytesIO(data)) as picture:
            assert (picture.size, picture.getpixel((0, 0))) == ((16, 8), (7 + index,) * 3)
            single = json_format.Parse(picture.info["bottega"], generation_pb2.GenerationSpec())
            settings = f"Steps: 5, CFG scale: 4, Seed: {7 + index}, Size: 16x8, Model hash: abc"
            assert f"a flat colour, 星\n{settings}" in picture.info["parameters"]
        expected = generation_pb2.GenerationSpec()
        expected.CopyFrom(order.spec)
        expected.num_images = 1
        expected.seed = 7 + index
        assert single == expected
        assert "num_inference_steps" in picture.info["bottega"]
    provenance = events[-1].completed.provenance
    assert (provenance.worker, provenance.model_hash, provenance.bottega_version) == ("w", "abc", "0.1.0")
    assert provenance.parameters == order.spec
    times = {stage.stage: stage.seconds for stage in provenance.times}
    assert times.keys() == {"handoff", "encode_image"}
    assert 0 < times["handoff"] < 2 * took_s  # of two pictures, which wait for a codec process to start


async def test_the_source_image_reaches_the_engine_resized_and_no_further(running: Running) -> None:
    events = await running.events(request(image=png(50, 40, "teal"), number=3))
    with Image.open(io.BytesIO(images(events)[0])) as picture:
        assert (picture.size, picture.getpixel((8, 4))) == ((16, 8), (0, 128, 128))
        assert "image" not in json.loads(picture.info["bottega"])
    provenance = events[-1].completed.provenance
    assert len(provenance.image_digest) == 64
    assert not provenance.parameters.HasField("image")
    assert "decode_image" in {time.stage for time in provenance.times}


def latents(events: list[worker_pb2.RunAttemptResponse]) -> dict[int, bytes]:
    """What is kept, by image; checks that it comes before the end, and says what its last chunk is."""
    found: dict[int, bytes] = {}
    ended: set[int] = set()
    for event in events[:-1]:
        if event.HasField("kept"):
            assert event.kept.index not in ended
            found[event.kept.index] = found.get(event.kept.index, b"") + event.kept.chunk
            ended |= {event.kept.index} if event.kept.last else set()
    assert ended == found.keys()
    return found


async def test_what_the_engine_keeps_of_pictures_comes_in_chunks_before_the_end(running: Running) -> None:
    order = request()
    order.spec.num_images, order.spec.keep_for_editing = 2, True
    events = await running.events(order)
    assert latents(events) == {0: LATENTS, 1: LATENTS}
    assert len([event for event in events if event.HasField("kept")]) == 6, "256 KiB in each"
    assert sorted(images(events)) == [0, 1]
    assert latents(await running.events(order)) == {0: LATENTS, 1: LATENTS}, "told again, as the pictures are"
    assert latents(await running.events(request())) == {}


async def test_what_was_kept_of_an_edits_image_reaches_the_engine(running: Running) -> None:
    order = request(image=png(50, 40, "teal"))
    order.kept = b"kept"
    order.spec.mask_image = png(50, 40, "white")
    order.spec.keep_unmasked, order.spec.mask_feather = True, 8
    assert latents(await running.events(order)) == {0: b"tpek"}


async def test_formats_and_previews_are_as_asked(running: Running) -> None:
    order = request(preview=True)
    order.spec.format = generation_pb2.IMAGE_FORMAT_WEBP
    order.spec.quality = 100
    events = await running.events(order)
    with Image.open(io.BytesIO(images(events)[0])) as picture:
        assert picture.format == "WEBP"
    previews = [event.progress.preview_jpeg for event in events if event.progress.preview_jpeg]
    assert previews
    with Image.open(io.BytesIO(previews[-1])) as preview:
        assert (preview.format, preview.size) == ("JPEG", (8, 8))


async def test_previews_may_be_asked_for_later(running: Running) -> None:
    order = request("slower")
    order.spec.num_inference_steps = 200
    asked = worker_pb2.PreviewAttemptRequest(attempt=order.attempt)
    assert not (await running.stub.PreviewAttempt(asked, timeout=5)).known
    previewed: list[bool] = []
    async for event in running.stub.RunAttempt(order, timeout=15):
        if event.HasField("progress"):
            previewed.append(bool(event.progress.preview_jpeg))
        if len(previewed) == 1:
            assert (await running.stub.PreviewAttempt(asked, timeout=5)).known
        if previewed and previewed[-1]:
            break
    assert previewed[0] is False
    await running.stub.CancelAttempt(worker_pb2.CancelAttemptRequest(attempt=order.attempt), timeout=5)


async def test_previews_asked_for_before_the_engine_has_the_attempt_are_not_forgotten(running: Running) -> None:
    order = request("slow", image=png(2000, 2000))
    order.spec.num_inference_steps = 100
    following = asyncio.create_task(running.events(order))
    await eventually(lambda: any(not each.ended for each in running.worker.attempts))
    await running.stub.PreviewAttempt(worker_pb2.PreviewAttemptRequest(attempt=order.attempt), timeout=5)
    assert any(event.progress.preview_jpeg for event in await following)


async def test_a_bad_source_image_fails_the_attempt_only(running: Running) -> None:
    events = await running.events(request(image=b"no image"))
    assert kinds(events) == ["failed"]
    assert events[0].failed.reason == error_pb2.ERROR_REASON_BAD_IMAGE
    assert kinds(await running.events(request()))[-1] == "completed"


async def test_breaking_the_stream_stops_nothing_and_attaching_gets_the_same_bytes(running: Running) -> None:
    order = request("slow")
    assert kinds(await running.events(order, until="progress"))[-1] == "progress"
    first = await running.events(order)
    again = await running.events(order)
    assert images(first) == images(again)
    assert images(first)
    assert kinds(again)[-1] == "completed"
    assert running.worker.load().running == []


async def test_cancelling_stops_and_forgets(running: Running) -> None:
    order = request("slower")
    order.spec.num_inference_steps = 200
    following = asyncio.create_task(running.events(order))
    await running.drawing()
    told = running.worker.load().fixed_s
    cancel = worker_pb2.CancelAttemptRequest(attempt=order.attempt)
    assert (await running.stub.CancelAttempt(cancel, timeout=5)).known
    assert (await following)[-1].failed.reason == error_pb2.ERROR_REASON_JOB_CANCELLED
    assert not (await running.stub.CancelAttempt(cancel, timeout=5)).known
    listed = await running.stub.ListAttempts(worker_pb2.ListAttemptsRequest(), timeout=5)
    assert order.attempt not in [each.attempt for each in listed.attempts]
    await eventually(lambda: running.worker.load().fixed_s == told + 100)  # the engine was told, once
    order.spec.num_inference_steps = 5
    assert kinds(await running.events(order))[-1] == "completed"


async def test_a_later_attempt_supersedes_and_an_earlier_one_is_refused(running: Running) -> None:
    slow = request("slower", job_id="superseded")
    slow.spec.num_inference_steps = 200
    first = asyncio.create_task(running.events(slow))
    await running.drawing()
    second = await running.events(request(job_id="superseded", number=2))
    assert kinds(second)[-1] == "completed"
    assert (await first)[-1].failed.reason == error_pb2.ERROR_REASON_STALE_ATTEMPT
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await running.events(slow)
    assert isinstance(from_rpc_error(refused.value), StaleAttempt)


async def test_an_attempt_ends_with_its_deadline(running: Running) -> None:
    order = request("slow", deadline_s=0.2)
    order.spec.num_inference_steps = 200
    events = await running.events(order)
    assert events[-1].failed.reason == error_pb2.ERROR_REASON_DEADLINE_PASSED


async def test_checkpoints_stream_and_resume(running: Running) -> None:
    order = request("slow")
    order.spec.num_inference_steps = 20
    watching = running.stub.WatchCheckpoints(worker_pb2.WatchCheckpointsRequest(), timeout=15)
    following = asyncio.create_task(running.events(order))
    newest = 0
    async for checkpoint in watching:
        assert checkpoint.attempt == order.attempt
        assert checkpoint.steps_done > newest
        newest = checkpoint.steps_done
        if newest >= 3:
            break
    watching.cancel()
    await following
    resumed = request(number=2, checkpoint=b"4")
    events = await running.events(resumed)
    assert (events[0].started.steps_total, events[0].started.steps_resumed) == (5, 4)


async def test_the_same_order_is_the_same_bytes_in_another_job_and_resumed_on_another_worker(
    running: Running,
) -> None:
    order = request("a flat colour, 星")
    order.spec.num_images = 2
    resumed = request("a flat colour, 星", number=2, checkpoint=b"3", request_id="again")
    resumed.spec.num_images = 2
    again = request("a flat colour, 星")
    again.spec.num_images = 2
    first = images(await running.events(order))
    assert sorted(first) == [0, 1]
    async with running_workers() as start:
        other = await start(replace(CONFIG, name="another"))
        assert images(await other.events(resumed)) == first
        assert images(await other.events(again)) == first


async def test_an_order_for_another_model_is_refused_and_nothing_of_it_is_kept(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bottega.worker")
    order = request()
    for order.spec.model in ("nobody", "", "Scripted", "m" * 200):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.events(order)
        error = from_rpc_error(refused.value)
        assert (type(error), error.metadata["served"]) == (ModelNotFound, "scripted")
    assert order.attempt.job_id not in [each.key.job_id for each in running.worker.attempts]
    assert "attempt started" not in caplog.messages
