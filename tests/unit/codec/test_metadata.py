"""Pictures of every format contain their parameters, where Bottega and other tools find them again."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping

import pytest
from PIL import Image

from bottega.codec import images, metadata
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import ImageFormat

TEXTS = {"bottega": '{"prompt": "ein Stern ★"}', "parameters": "ein Stern ★\nSteps: 20, Seed: 7, Size: 8x8"}
JPEG, WEBP = generation_pb2.IMAGE_FORMAT_JPEG, generation_pb2.IMAGE_FORMAT_WEBP
OTHERS = pytest.mark.parametrize("image_format", [JPEG, WEBP], ids=["jpeg", "webp"])


def encoded(image_format: ImageFormat.ValueType, texts: Mapping[str, str], quality: int = 90) -> bytes:
    return images.encode_image(Image.new("RGB", (8, 8), "red"), image_format, quality, texts)


@OTHERS
@pytest.mark.parametrize("quality", [90, 100])
def test_jpeg_and_webp_contain_both_texts(image_format: ImageFormat.ValueType, quality: int) -> None:
    data = encoded(image_format, TEXTS, quality)
    assert metadata.read_exif_texts(data) == TEXTS
    assert metadata.read_exif_texts(encoded(image_format, {})) == {}
    assert "exif" not in Image.open(io.BytesIO(encoded(image_format, {}))).info


@OTHERS
def test_readers_of_the_web_ui_find_its_text(image_format: ImageFormat.ValueType) -> None:
    # As its `read_info_from_image` and piexif.helper.UserComment.load read it.
    exif = Image.open(io.BytesIO(encoded(image_format, TEXTS))).getexif().get_ifd(0x8769)
    comment = exif[0x9286]
    assert comment[:8] == b"UNICODE\0"
    assert comment[8:].decode("utf_16_be") == TEXTS["parameters"]


@pytest.mark.parametrize(
    ("own", "summary", "kept"),
    [
        (20_000, 40_000, ["bottega"]),
        (66_000, 40_000, ["bottega"]),
        (140_000, 100, ["bottega", "parameters"]),
        (20_000, 20_000, ["bottega", "parameters"]),
    ],
)
def test_a_jpeg_contains_its_parameters_and_a_summary_of_less_than_64_kib(
    own: int, summary: int, kept: list[str]
) -> None:
    texts = {"bottega": "x" * own, "parameters": "y" * summary}
    read = metadata.read_exif_texts(encoded(JPEG, texts))
    assert read == {name: texts[name] for name in kept}
    assert metadata.read_exif_texts(encoded(WEBP, texts)) == texts


@OTHERS
def test_damaged_exif_is_read_within_bounds(image_format: ImageFormat.ValueType) -> None:
    whole, chance = encoded(image_format, TEXTS), random.Random(7)
    for _ in range(2000):
        broken = bytearray(whole[: chance.randrange(len(whole))] if chance.random() < 0.2 else whole)
        for _ in range(chance.randrange(1, 5)):
            if broken:
                broken[chance.randrange(min(len(broken), 400))] = chance.randrange(256)
        assert sum(map(len, metadata.read_exif_texts(bytes(broken)).values())) <= len(whole)
