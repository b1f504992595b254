"""Jobs outlive connections: they can be looked at, watched, attached to, cancelled and fetched, by id."""

from __future__ import annotations

import hashlib
import io
import time
import uuid
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from bottega.client import Client, Completed, JobState, Progress
from bottega.errors import ImageNotFound, JobCancelled, JobNotFinished, RequestIdReused
from bottega.rpc.status import from_rpc_error
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import GenerateRequest, GetImageRequest
from bottega.v1.image_pb2_grpc import ImageServiceStub
from tests.support.waiting import wait_until

PROMPT = "a small green circle on a white background"
QUICK: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 4.0}
# Long enough to be looked at while it runs.
LONG: dict[str, Any] = {"num_inference_steps": 200, "guidance_scale": 4.0}
# The same image drawn beside others and alone: shapes of the forward differ, and so may the last bit of a value.
SHAPES_APART = 1


def _pixels(data: bytes) -> npt.NDArray[np.int16]:
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture, dtype=np.int16)


def _ended(client: Client, job_id: str) -> JobState:
    wait_until(lambda: client.job(job_id).status().state.ended, f"{job_id} to end")
    return client.job(job_id).status().state


def test_a_submitted_job_runs_to_its_end_and_keeps_its_picture(client: Client) -> None:
    job = client.submit(PROMPT, num_images=2, seed=4, **QUICK)
    assert job.status().state in {JobState.QUEUED, JobState.RUNNING}

    assert _ended(client, job.id) is JobState.COMPLETED

    done = job.status()
    assert (done.steps_done, done.steps_total, done.image_count) == (8, 8, 2)
    assert done.started is not None
    assert done.ended is not None
    assert done.created <= done.started <= done.ended
    assert done.provenance is not None
    alone = client.generate(PROMPT, seed=5, **QUICK)
    assert np.abs(_pixels(job.image(1).data) - _pixels(alone.data)).max() <= SHAPES_APART
    with pytest.raises(ImageNotFound):
        job.image(2)


def test_whoever_watches_a_job_that_runs_may_ask_for_previews(client: Client) -> None:
    job = client.submit(PROMPT, seed=4, **LONG)
    wait_until(lambda: job.status().steps_done > 0, "the first step")

    events = [event for event in job.watch(preview=True) if isinstance(event, Progress)]

    assert any(event.previews for event in events)


def test_watching_tells_the_state_first_and_the_end_last(client: Client) -> None:
    job = client.submit(PROMPT, seed=4, **{**LONG, "num_inference_steps": 80})

    events = list(job.watch())

    assert isinstance(events[-1], Completed)
    assert any(isinstance(event, Progress) for event in events)
    again = list(job.watch())
    assert isinstance(again[-1], Completed)
    assert again[-1].images[0].data == events[-1].images[0].data


def test_the_same_request_id_gives_the_same_bytes_and_draws_once(client: Client) -> None:
    request_id = uuid.uuid4().hex
    first = client.generate(PROMPT, request_id=request_id, **QUICK)

    again = client.generate(PROMPT, request_id=request_id, **QUICK)

    assert (again.job_id, again.data, again.seed) == (first.job_id, first.data, first.seed)
    with pytest.raises(RequestIdReused):
        client.generate("something else", request_id=request_id, **QUICK)


def test_a_request_with_an_id_goes_on_when_its_caller_leaves(images: ImageServiceStub, client: Client) -> None:
    request_id = uuid.uuid4().hex
    spec = GenerationSpec(prompt=PROMPT, num_inference_steps=60, seed=1)
    call = images.Generate(GenerateRequest(request_id=request_id, spec=spec), timeout=60)
    job_id = next(call).event.job_id
    call.cancel()

    assert _ended(client, job_id) is JobState.COMPLETED
    attached = client.generate(PROMPT, request_id=request_id, num_inference_steps=60, seed=1)
    assert attached.job_id == job_id


def test_a_request_without_an_id_ends_when_its_caller_leaves(images: ImageServiceStub, client: Client) -> None:
    # Long enough to be left, and on a slow machine still done within its deadline, else it would be refused.
    call = images.Generate(GenerateRequest(spec=GenerationSpec(prompt=PROMPT, num_inference_steps=200)), timeout=60)
    job_id = next(call).event.job_id
    call.cancel()

    assert _ended(client, job_id) is JobState.CANCELLED


def test_cancelling_stops_a_job_and_whoever_watches_it(client: Client) -> None:
    job = client.submit(PROMPT, num_images=8, **LONG)
    wait_until(lambda: job.status().steps_done > 0, "the first step")
    with pytest.raises(JobNotFinished):
        job.image()

    began = time.monotonic()
    job.cancel()

    assert _ended(client, job.id) is JobState.CANCELLED
    with pytest.raises(JobCancelled):
        list(job.watch())
    client.generate(PROMPT, **QUICK)
    assert time.monotonic() - began < 5.0, "the cancelled job went on computing"
    assert job.cancel().state is JobState.CANCELLED


def test_jobs_are_listed_newest_first_in_pages(client: Client) -> None:
    made = [client.submit(PROMPT, seed=seed, **QUICK).id for seed in range(5)]
    for job_id in made:
        _ended(client, job_id)

    seen: list[str] = []
    token = ""
    while len(seen) < 5:
        page = client.list_jobs(page_size=2, page_token=token)
        assert len(page.jobs) == 2
        seen += [job.job_id for job in page.jobs]
        token = page.next_page_token

    assert seen[:5] == made[::-1]
    running = client.list_jobs(states=[JobState.QUEUED, JobState.RUNNING]).jobs
    assert not set(made) & {job.job_id for job in running}


def test_an_image_comes_in_chunks_whose_digest_is_told_first(images: ImageServiceStub, client: Client) -> None:
    picture = client.generate(PROMPT, seed=2, **QUICK)

    answers = list(images.GetImage(GetImageRequest(job_id=picture.job_id, index=0), timeout=10))

    data = b"".join(answer.chunk for answer in answers)
    assert data == picture.data
    assert answers[0].image.digest == hashlib.sha256(data).hexdigest()
    assert answers[0].image.size_bytes == len(data)
    assert not any(answer.HasField("image") for answer in answers[1:])


def test_a_deadline_that_passes_is_told_as_such(images: ImageServiceStub) -> None:
    spec = GenerationSpec(prompt=PROMPT, num_inference_steps=200, num_images=8)

    with pytest.raises(grpc.RpcError) as raised:
        list(images.Generate(GenerateRequest(spec=spec), timeout=1.0))

    code = from_rpc_error(raised.value).code
    assert code.name in {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
