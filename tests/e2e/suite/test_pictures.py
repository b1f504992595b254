"""Pictures through the whole suite are those that stock Diffusers draws for the same seed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from bottega.client import Client, parameters_of
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import GenerateRequest
from bottega.v1.image_pb2_grpc import ImageServiceStub
from tests.support.stock import Stock, assert_same_image, pixels_of

PROMPT = "a big red star on the left on a blue background"
OPTIONS: dict[str, Any] = {"num_inference_steps": 8, "guidance_scale": 5.0}


def test_text_to_image_is_the_picture_of_stock_diffusers(client: Client, stock: Stock) -> None:
    picture = client.generate(PROMPT, seed=7, **OPTIONS)

    assert (picture.seed, picture.format, picture.width, picture.height) == (7, "png", 64, 64)
    assert_same_image(pixels_of(picture.pil()), stock.draw(PROMPT, seed=7, **OPTIONS))


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"sampler": "euler_ancestral"}, {"scheduler": "EulerAncestralDiscreteScheduler"}),
        ({"sampler": "ddim"}, {"scheduler": "DDIMScheduler"}),
        (
            {"sampler": "dpmpp_2m", "use_karras_sigmas": True},
            {"scheduler": "DPMSolverMultistepScheduler", "karras": True},
        ),
        (
            {"negative_prompt": "a green circle", "guidance_rescale": 0.5, "width": 96, "height": 32},
            {"negative_prompt": "a green circle", "guidance_rescale": 0.5, "width": 96, "height": 32},
        ),
        ({"negative_prompt": ""}, {"negative_prompt": ""}),
        ({"prompt_2": "a small green circle"}, {"prompt_2": "a small green circle"}),
        ({"guidance_scale": 1.0}, {"guidance_scale": 1.0}),
    ],
    ids=["ancestral", "ddim", "dpmpp-karras", "negative-rescaled-wide", "empty-negative", "second-prompt", "unguided"],
)
def test_every_option_means_what_it_means_in_diffusers(
    client: Client, stock: Stock, options: dict[str, Any], reference: dict[str, Any]
) -> None:
    picture = client.generate(PROMPT, seed=11, **{**OPTIONS, **options})

    assert_same_image(pixels_of(picture.pil()), stock.draw(PROMPT, seed=11, **{**OPTIONS, **reference}))


def test_image_to_image_is_the_picture_of_stock_diffusers(client: Client, stock: Stock) -> None:
    source = client.generate("a small green circle on a white background", seed=3, **OPTIONS).pil()

    picture = client.generate(PROMPT, seed=5, image=source, strength=0.6, **OPTIONS)

    assert_same_image(pixels_of(picture.pil()), stock.redraw(PROMPT, source, seed=5, strength=0.6, **OPTIONS))
    assert picture.provenance.begin_step > 0
    assert len(picture.provenance.image_digest) == 64


def test_image_i_is_a_single_run_with_the_seed_plus_i(client: Client, stock: Stock) -> None:
    pictures = client.generate_many(PROMPT, 3, seed=20, **OPTIONS)

    assert [(picture.index, picture.seed) for picture in pictures] == [(0, 20), (1, 21), (2, 22)]
    for picture in pictures:
        assert_same_image(pixels_of(picture.pil()), stock.draw(PROMPT, seed=picture.seed, **OPTIONS))


def test_a_seed_that_was_drawn_is_returned_and_draws_the_same_again(client: Client) -> None:
    first = client.generate(PROMPT, **OPTIONS)
    again = client.generate(PROMPT, seed=first.seed, **OPTIONS)

    assert first.provenance.parameters.seed == first.seed
    assert again.pil().tobytes() == first.pil().tobytes()
    assert client.generate(PROMPT, **OPTIONS).seed != first.seed


def test_formats_carry_the_same_picture(client: Client) -> None:
    png = client.generate(PROMPT, seed=7, **OPTIONS)
    lossless = client.generate(PROMPT, seed=7, format="webp", quality=100, **OPTIONS)
    jpeg = client.generate(PROMPT, seed=7, format="jpeg", quality=95, **OPTIONS)

    pixels = np.asarray(png.pil().convert("RGB")).astype(int)
    for picture, kind in ((lossless, "WEBP"), (jpeg, "JPEG")):
        assert PIL.Image.open(io.BytesIO(picture.data)).format == kind
    assert (np.asarray(lossless.pil().convert("RGB")) == pixels).all()
    assert np.abs(np.asarray(jpeg.pil().convert("RGB")) - pixels).mean() < 8.0


def test_a_png_carries_the_parameters_that_draw_it_again(client: Client, tmp_path: Path) -> None:
    picture = client.generate(PROMPT, seed=9, negative_prompt="", **OPTIONS)

    prompt, options = parameters_of(picture.save(tmp_path / "star.png"))

    assert (prompt, options["seed"], options["negative_prompt"]) == (PROMPT, 9, "")
    assert client.generate(prompt, **options).data == picture.data


def test_a_prompt_beyond_the_tokenizer_is_cut_and_the_provenance_says_so(client: Client, stock: Stock) -> None:
    long = PROMPT + " and a small green circle" * 30

    picture = client.generate(long, seed=7, **OPTIONS)

    assert_same_image(pixels_of(picture.pil()), stock.draw(long, seed=7, **OPTIONS))
    cut = {truncation.field: truncation.text for truncation in picture.provenance.truncations}
    assert "prompt" in cut
    assert "circle" in cut["prompt"]
    assert not client.generate(PROMPT, seed=7, **OPTIONS).provenance.truncations


def test_the_provenance_says_what_happened(client: Client) -> None:
    provenance = client.generate(PROMPT, seed=7, **OPTIONS).provenance

    assert provenance.exact
    assert (provenance.attempts, provenance.repeated_steps, provenance.begin_step) == (1, 0, 0)
    assert (provenance.worker, provenance.dtype, provenance.device) == ("w1", "float32", "cpu")
    assert provenance.parameters.model == "miniature"
    assert provenance.parameters.guidance_scale == 5.0
    assert len(provenance.model_hash) == 64
    assert provenance.mean_group_requests >= 1.0
    times = {time.stage: time.seconds for time in provenance.times}
    assert {"queue", "route", "encode", "denoise", "batch", "decode", "handoff", "encode_image"} <= times.keys()
    assert times["denoise"] > 0.0


def test_requests_drawn_together_are_the_pictures_of_stock_diffusers(images: ImageServiceStub, stock: Stock) -> None:
    steps = {30: 12, 31: 5, 32: 9, 33: 7}
    streams = {
        seed: images.Generate(
            GenerateRequest(
                spec=GenerationSpec(prompt=PROMPT, seed=seed, num_inference_steps=count, guidance_scale=5.0)
            ),
            timeout=60,
        )
        for seed, count in steps.items()
    }

    for seed, stream in streams.items():
        done = list(stream)[-1].event.completed
        picture = PIL.Image.open(io.BytesIO(done.images[0].data))
        reference = stock.draw(PROMPT, seed=seed, num_inference_steps=steps[seed], guidance_scale=5.0)
        assert_same_image(pixels_of(picture), reference)


def test_previews_come_when_they_are_asked_for(images: ImageServiceStub) -> None:
    spec = GenerationSpec(prompt=PROMPT, seed=1, num_inference_steps=60, format=generation_pb2.IMAGE_FORMAT_WEBP)

    events = [answer.event for answer in images.Generate(GenerateRequest(spec=spec, preview=True), timeout=60)]

    previews = [preview for event in events for preview in event.progress.previews]
    assert previews
    assert PIL.Image.open(io.BytesIO(previews[0].jpeg)).size == (16, 16)
    steps = [event.progress.steps_done for event in events if event.HasField("progress")]
    assert steps == sorted(steps)
    assert events[-1].HasField("completed")
