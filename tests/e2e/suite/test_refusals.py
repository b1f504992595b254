"""What cannot be drawn is refused before anything is touched, with everything that is wrong and what would be right."""

from __future__ import annotations

import io
import struct
import zlib

import PIL.Image
import pytest

from bottega.client import Client
from bottega.errors import (
    BadImage,
    InvalidRequest,
    ModelNotFound,
    TooLarge,
)

PROMPT = "a red star"


def _png(width: int = 64, height: int = 64) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (width, height), "navy").save(buffer, "PNG")
    return buffer.getvalue()


def _bomb() -> bytes:
    """A PNG of a few bytes that claims to be 50,000 x 50,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_an_unknown_model_is_not_found_with_the_list_of_those_served(client: Client) -> None:
    with pytest.raises(ModelNotFound) as raised:
        client.generate(PROMPT, model="no-such-model")

    assert raised.value.metadata["served"] == "miniature"


def test_every_violation_is_listed_at_once(client: Client) -> None:
    with pytest.raises(InvalidRequest) as raised:
        client.generate_many(
            PROMPT,
            9,
            num_inference_steps=0,
            guidance_scale=51.0,
            guidance_rescale=1.5,
            width=63,
            seed=2**53,
            sampler="ddim",
            use_karras_sigmas=True,
            strength=0.5,
            quality=101,
            format="jpeg",
        )

    fields = {violation.field.removeprefix("spec.") for violation in raised.value.violations}
    expected = {"num_images", "num_inference_steps", "guidance_scale", "guidance_rescale", "width", "seed"}
    assert expected | {"use_karras_sigmas", "strength", "quality"} <= fields


@pytest.mark.parametrize("data", [b"no image", _png()[:60], _bomb()], ids=["text", "cut", "bomb"])
def test_an_image_that_cannot_be_decoded_is_refused_before_it_is_acknowledged(client: Client, data: bytes) -> None:
    before = len(client.list_jobs(page_size=100).jobs)

    with pytest.raises(BadImage):
        client.submit(PROMPT, image=data)

    assert len(client.list_jobs(page_size=100).jobs) == before


def test_a_request_that_cannot_fit_is_refused_with_the_limit_named(client: Client) -> None:
    (model,) = client.models()
    side = model.size_multiple * (int(model.max_pixels**0.5) // model.size_multiple + 1)

    with pytest.raises((TooLarge, InvalidRequest), match=str(model.max_pixels)):
        client.generate(PROMPT, width=side, height=side)
