"""Jobs outlive connections: they can be looked at, watched, attached to, cancelled and fetched, by id."""

from __future__ import annotations

import io
import uuid
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from bottega.client import Client, JobState, Progress
from bottega.errors import ImageNotFound, RequestIdReused
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


def test_the_same_request_id_gives_the_same_bytes_and_draws_once(client: Client) -> None:
    request_id = uuid.uuid4().hex
    first = client.generate(PROMPT, request_id=request_id, **QUICK)

    again = client.generate(PROMPT, request_id=request_id, **QUICK)

    assert (again.job_id, again.data, again.seed) == (first.job_id, first.data, first.seed)
    with pytest.raises(RequestIdReused):
        client.generate("something else", request_id=request_id, **QUICK)
