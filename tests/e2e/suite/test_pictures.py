"""Pictures through the whole suite are those that stock Diffusers draws for the same seed."""

from __future__ import annotations

from typing import Any

from bottega.client import Client
from tests.support.stock import Stock, assert_same_image, pixels_of

PROMPT = "a big red star on the left on a blue background"
OPTIONS: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 5.0}


def test_text_to_image_is_the_picture_of_stock_diffusers(client: Client, stock: Stock) -> None:
    picture = client.generate(PROMPT, seed=7, **OPTIONS)

    assert (picture.seed, picture.format, picture.width, picture.height) == (7, "png", 64, 64)
    assert_same_image(pixels_of(picture.pil()), stock.draw(PROMPT, seed=7, **OPTIONS))


def test_image_to_image_is_the_picture_of_stock_diffusers(client: Client, stock: Stock) -> None:
    source = client.generate("a small green circle on a white background", seed=3, **OPTIONS).pil()

    picture = client.generate(PROMPT, seed=5, image=source, strength=0.6, **OPTIONS)

    assert_same_image(pixels_of(picture.pil()), stock.redraw(PROMPT, source, seed=5, strength=0.6, **OPTIONS))
    assert picture.provenance.begin_step > 0
    assert len(picture.provenance.image_digest) == 64


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
