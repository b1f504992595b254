"""Pictures through the whole suite are those that stock Diffusers draws for the same seed."""

from __future__ import annotations

from typing import Any

import PIL.Image
import pytest

from bottega.client import Client
from bottega.errors import InvalidRequest
from tests.support.stock import Stock, assert_same_image, pixels_of

PROMPT = "a big red star on the left on a blue background"
OPTIONS: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 5.0}


def test_text_to_image_is_the_picture_of_stock_diffusers(client: Client, stock: Stock) -> None:
    picture = client.generate(PROMPT, seed=7, **OPTIONS)

    assert (picture.seed, picture.format, picture.width, picture.height) == (7, "png", 64, 64)
    assert_same_image(pixels_of(picture.pil()), stock.draw(PROMPT, seed=7, **OPTIONS))


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        (
            {"sampler": "dpmpp_2m", "use_karras_sigmas": True},
            {"scheduler": "DPMSolverMultistepScheduler", "karras": True},
        ),
        (
            {"negative_prompt": "a green circle", "guidance_rescale": 0.5, "width": 96, "height": 32},
            {"negative_prompt": "a green circle", "guidance_rescale": 0.5, "width": 96, "height": 32},
        ),
        ({"clip_skip": 1, "prompt_syntax": "plain"}, {"clip_skip": 1}),
    ],
    ids=["dpmpp-karras", "negative-rescaled-wide", "clip-skip"],
)
def test_every_option_means_what_it_means_in_diffusers(
    client: Client, stock: Stock, options: dict[str, Any], reference: dict[str, Any]
) -> None:
    picture = client.generate(PROMPT, seed=11, **{**OPTIONS, **options})

    assert_same_image(pixels_of(picture.pil()), stock.draw(PROMPT, seed=11, **{**OPTIONS, **reference}))


def test_timesteps_of_a_request_are_stocks_and_draw_the_picture_again(client: Client, stock: Stock) -> None:
    timesteps = [999, 850, 600, 350, 100]
    picture = client.generate(PROMPT, seed=11, sampler="heun", timesteps=timesteps, guidance_scale=5.0)
    theirs = stock.draw(PROMPT, seed=11, scheduler="HeunDiscreteScheduler", timesteps=timesteps, guidance_scale=5.0)
    assert_same_image(pixels_of(picture.pil()), theirs)
    parameters = picture.provenance.parameters
    assert (parameters.num_inference_steps, parameters.timesteps) == (5, tuple(timesteps))
    assert client.generate(PROMPT, **parameters.options()).pil().tobytes() == picture.pil().tobytes()
    with pytest.raises(InvalidRequest, match="timesteps: must be below 1000, the timesteps that the model was trained"):
        client.generate(PROMPT, timesteps=[1000, 500])


def test_image_to_image_is_the_picture_of_stock_diffusers(client: Client, stock: Stock) -> None:
    source = client.generate("a small green circle on a white background", seed=3, **OPTIONS).pil()

    picture = client.generate(PROMPT, seed=5, image=source, strength=0.6, **OPTIONS)

    assert_same_image(pixels_of(picture.pil()), stock.redraw(PROMPT, source, seed=5, strength=0.6, **OPTIONS))
    assert picture.provenance.begin_step > 0
    assert len(picture.provenance.image_digest) == 64


def test_a_seed_that_was_drawn_is_returned_and_draws_the_same_again(client: Client) -> None:
    first = client.generate(PROMPT, **OPTIONS)
    again = client.generate(PROMPT, seed=first.seed, **OPTIONS)

    assert first.provenance.parameters.seed == first.seed
    assert again.pil().tobytes() == first.pil().tobytes()
    assert client.generate(PROMPT, **OPTIONS).seed != first.seed


@pytest.mark.parametrize("source", [False, True], ids=["text-to-image", "image-to-image"])
def test_an_identical_request_has_the_stored_picture_where_it_may(client: Client, source: bool) -> None:
    options: dict[str, Any] = {**OPTIONS, "num_inference_steps": 3, "seed": 12}
    if source:
        options |= {"image": PIL.Image.new("RGB", (64, 64), "red"), "strength": 0.7}
    drawn = client.generate(PROMPT, **options)
    again = client.generate(PROMPT, identical_results=True, **options)

    assert (drawn.provenance.identical_job, again.provenance.identical_job) == ("", drawn.job_id)
    assert again.data == drawn.data
    assert (again.provenance.attempts, again.provenance.model_hash) == (0, drawn.provenance.model_hash)
    assert client.generate(PROMPT, **options).provenance.attempts == 1


def test_several_prompts_in_one_request_are_the_pictures_of_stock_diffusers(client: Client, stock: Stock) -> None:
    prompts = [PROMPT, "a small green circle on a white background"]
    pictures = client.generate_many(prompts, seed=7, **OPTIONS)

    assert [picture.seed for picture in pictures] == [7, 8]
    for picture, prompt in zip(pictures, prompts, strict=True):
        assert_same_image(pixels_of(picture.pil()), stock.draw(prompt, seed=picture.seed, **OPTIONS))
        assert (picture.provenance.exact, picture.provenance.parameters.prompts) == (True, tuple(prompts))


def test_a_prompt_beyond_the_tokenizer_is_cut_and_the_provenance_says_so(client: Client, stock: Stock) -> None:
    long = PROMPT + " and a small green circle" * 30

    picture = client.generate(long, seed=7, **OPTIONS)

    assert_same_image(pixels_of(picture.pil()), stock.draw(long, seed=7, **OPTIONS))
    (cut,) = picture.provenance.truncations
    assert (cut.field, cut.encoders) == ("prompt", ("text_encoder", "text_encoder_2"))
    assert "circle" in cut.text
    assert not client.generate(PROMPT, seed=7, **OPTIONS).provenance.truncations


def test_a_weighted_prompt_is_whole_and_its_provenance_draws_it_again(client: Client, stock: Stock) -> None:
    weighted: dict[str, Any] = {**OPTIONS, "seed": 7, "prompt_syntax": "weighted"}
    unchanged = client.generate(f"({PROMPT}:1.0)", **weighted)
    assert_same_image(pixels_of(unchanged.pil()), stock.draw(PROMPT, seed=7, **OPTIONS))

    picture = client.generate(f"(star:1.5), {'a small green circle ' * 10} BREAK {PROMPT}", **weighted)
    provenance = picture.provenance
    assert (provenance.exact, provenance.truncations, provenance.parameters.prompt_syntax) == (True, (), "weighted")
    assert picture.data != unchanged.data
    again = client.generate(provenance.parameters.prompt, **provenance.parameters.options())
    assert again.pil().tobytes() == picture.pil().tobytes()

    with pytest.raises(InvalidRequest, match=r"prompt: has the weight 1.2.3, which is not a number"):
        client.generate("(star:1.2.3)", **weighted)
    with pytest.raises(InvalidRequest, match=r"prompt: has over 20 chunks of 22 tokens, which is the maximum"):
        client.generate("a star " * 500, **weighted)


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
