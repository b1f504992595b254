"""Streams of events, by OpenAI's own client: previews, the picture, errors, and clients that leave."""

from __future__ import annotations

import base64

import openai
import pytest

from bottega.errors import NotFinite
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.running_gateway import Running
from tests.support.running_http import Door

pytestmark = pytest.mark.asyncio(loop_scope="module")

_STEPS = {"bottega": {"num_inference_steps": 8, "seed": 3}}


async def test_previews_come_before_the_picture(door: Door, worker: ScriptedWorker) -> None:
    worker.script.preview, worker.script.pace_s = b"a jpeg", 0.12
    stream = await door.openai.images.generate(
        prompt="a star", stream=True, partial_images=2, size="64x64", extra_body=_STEPS
    )
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    assert [base64.b64decode(event.b64_json) for event in events] == [b"a jpeg", b"a jpeg", b"picture 0"]
    assert [getattr(event, "partial_image_index", None) for event in events] == [0, 1, None]
    assert (events[0].output_format, events[-1].output_format, events[-1].size) == ("jpeg", "png", "64x64")
    assert events[-1].usage.output_tokens == 4  # type: ignore[union-attr]
    assert events[-1].bottega["provenance"]["parameters"]["seed"] == 3  # type: ignore[union-attr]


async def test_without_partial_images_only_the_picture_comes(door: Door, worker: ScriptedWorker) -> None:
    stream = await door.openai.images.generate(prompt="a star", stream=True, n=2)
    assert [base64.b64decode(event.b64_json) async for event in stream] == [b"picture 0", b"picture 1"]


async def test_an_error_is_a_status_before_the_first_event_and_then_an_event(
    door: Door, worker: ScriptedWorker
) -> None:
    with pytest.raises(openai.BadRequestError):
        await door.openai.images.generate(prompt="a star", stream=True, size="65x64")
    worker.script.failure = NotFinite("the latent has NaN")
    stream = await door.openai.images.generate(prompt="a star", stream=True)
    with pytest.raises(openai.APIError, match="the latent has NaN"):
        async for _ in stream:
            pass


async def test_a_client_that_leaves_a_stream_cancels_its_job(
    door: Door, house: Running, worker: ScriptedWorker
) -> None:
    worker.script.hold_at = 1
    stream = await door.openai.images.generate(prompt="a star", stream=True)
    await worker.arrived.wait()
    await stream.close()
    attempt = await worker.cancelled.get()
    assert (await house.ended(attempt.job_id)).error.message
