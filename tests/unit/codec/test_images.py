"""Images are decoded as Diffusers decodes them, encoded as asked, and refused in our own words."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import load_image
from numpy.typing import NDArray
from PIL import Image

from bottega.codec import ImageSize, Pixels, images
from bottega.codec.structure import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from bottega.errors import BadImage
from bottega.v1 import generation_pb2
from tests.samples.hostile_images import chunk, saved

PNG, JPEG, WEBP = (
    generation_pb2.IMAGE_FORMAT_PNG,
    generation_pb2.IMAGE_FORMAT_JPEG,
    generation_pb2.IMAGE_FORMAT_WEBP,
)


def picture(width: int = 37, height: int = 23, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(7).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def as_diffusers(data: bytes, width: int, height: int) -> NDArray[np.uint8]:
    """What a Diffusers pipeline would see, back as uint8."""
    tensor = VaeImageProcessor(vae_scale_factor=8).preprocess(
        load_image(Image.open(io.BytesIO(data))), height=height, width=width
    )
    seen: NDArray[np.uint8] = ((tensor[0].permute(1, 2, 0).numpy() / 2 + 0.5) * 255).round().astype(np.uint8)
    return seen


def as_array(pixels: Pixels) -> NDArray[np.uint8]:
    return np.frombuffer(pixels.data, np.uint8).reshape(pixels.height, pixels.width, 3)


@pytest.mark.parametrize("size", [(64, 64), (16, 8), (128, 96), (40, 24)])
@pytest.mark.parametrize(
    "data",
    [
        saved(picture()),
        saved(picture(mode="L")),
        saved(picture(mode="RGBA")),
        saved(picture(mode="P")),
        saved(picture(mode="1")),
        saved(picture(), "JPEG"),
        saved(picture(mode="CMYK"), "JPEG"),
        saved(picture(), "WEBP", lossless=True),
    ],
    ids=["RGB", "grey", "RGBA", "palette", "bits", "JPEG", "CMYK", "WebP"],
)
def test_an_image_is_decoded_and_resized_as_diffusers_does(data: bytes, size: tuple[int, int]) -> None:
    width, height = size
    decoded = images.decode(data, width, height).pixels
    assert (decoded.width, decoded.height) == size
    np.testing.assert_array_equal(as_array(decoded), as_diffusers(data, width, height))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_exif_says(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(picture(40, 24), exif=exif)
    decoded = images.decode(data, 0, 0).pixels
    expected = np.asarray(load_image(Image.open(io.BytesIO(data))))
    np.testing.assert_array_equal(as_array(decoded), expected)
    size = images.inspect(data)
    assert (size.height, size.width) == expected.shape[:2]


def test_16_bit_grey_keeps_its_levels_and_it_is_said() -> None:
    levels = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    data = saved(Image.fromarray(levels))
    decoded = images.decode(data, 0, 0)
    assert as_array(decoded.pixels)[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    assert decoded.facts.scaled_from_16_bits
    assert load_image(Image.open(io.BytesIO(data))).getpixel((2, 0)) == (255, 255, 255), "as Diffusers has it"
    assert not images.decode(saved(picture(mode="L")), 0, 0).facts.scaled_from_16_bits


def see_through(width: int = 37, height: int = 23, mode: str = "RGBA") -> Image.Image:
    image = picture(width, height)
    image.putalpha(image.getchannel("G"))
    return image.convert(mode)


TRANSPARENT = {
    "RGBA": saved(see_through()),
    "grey with alpha": saved(see_through(mode="LA")),
    "a colour of a palette": saved(picture().quantize(16), transparency=3),
    "colours of a palette": saved(picture().quantize(16), transparency=bytes([0, 128, 255])),
    "a colour": saved(picture(), transparency=picture().getpixel((0, 0))),
    "a grey": saved(picture(mode="L"), transparency=picture(mode="L").getpixel((0, 0))),
    "WebP": saved(see_through(), "WEBP", lossless=True),
}


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", TRANSPARENT)
def test_of_transparent_images_the_colours_are_those_of_diffusers_and_the_rest_is_kept(name: str) -> None:
    data = TRANSPARENT[name]
    loaded = images.load_image(data)
    theirs = Image.open(io.BytesIO(data))
    np.testing.assert_array_equal(np.asarray(loaded.colours), np.asarray(load_image(theirs)))
    assert loaded.facts.transparent
    assert loaded.alpha is not None
    np.testing.assert_array_equal(np.asarray(loaded.alpha), np.asarray(theirs.convert("RGBA").getchannel("A")))


@pytest.mark.parametrize("data", [saved(picture()), saved(picture().convert("RGBA")), saved(picture().quantize(16))])
def test_an_opaque_image_has_no_transparency_whatever_its_file_has_room_for(data: bytes) -> None:
    loaded = images.load_image(data)
    assert (loaded.alpha, loaded.facts.transparent) == (None, False)


def test_what_a_file_has_beside_its_colours_is_that_of_the_turned_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = images.load_image(saved(see_through(40, 24), exif=exif))
    assert turned.alpha is not None
    assert (turned.alpha.size, turned.colours.size) == ((24, 40), (24, 40))
    assert turned.facts.size == ImageSize(width=24, height=40)


def png_of_size(width: int, height: int) -> bytes:
    """A valid PNG header of that size, with next to no pixels behind it."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(999))) + chunk(b"IEND", b"")


def animated(name: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    return saved(frames[0], name, save_all=True, append_images=frames[1:], duration=50)


@pytest.mark.parametrize("side", [5000, 20_000, 60_000])
def test_a_bomb_is_refused_by_its_header(side: int) -> None:
    with pytest.raises(BadImage, match=str(MAX_IMAGE_PIXELS)):
        images.decode(png_of_size(side, side), 8, 8)


def test_the_largest_size_is_taken() -> None:
    size = images.inspect(saved(Image.new("L", (4096, 4096)), compress_level=1))
    assert size.width * size.height == MAX_IMAGE_PIXELS


def test_too_many_bytes_are_refused() -> None:
    with pytest.raises(BadImage, match=str(MAX_IMAGE_BYTES)):
        images.inspect(saved(picture()) + bytes(MAX_IMAGE_BYTES))


REFUSED: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": lambda: b"GET / HTTP/1.1",
    "gif": lambda: saved(picture(mode="P"), "GIF"),
    "animated gif": lambda: animated("GIF"),
    "bmp": lambda: saved(picture(), "BMP"),
    "tiff": lambda: saved(picture(), "TIFF"),
    "svg": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "animated webp": lambda: animated("WEBP"),
    "animated png": lambda: animated("PNG"),
    "truncated png": lambda: saved(picture())[:-200],
    "truncated jpeg": lambda: saved(picture(200, 200), "JPEG")[:3000],
    "truncated webp": lambda: saved(picture(200, 200), "WEBP")[:3000],
    "pixels missing": lambda: png_of_size(100, 100),
    "only a signature": lambda: b"\x89PNG\r\n\x1a\n",
    "wrong checksum": lambda: saved(picture()).replace(b"IDAT", b"IDAT\xff", 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_single_whole_picture_is_refused_in_our_words(name: str) -> None:
    for call in (images.inspect, lambda data: images.decode(data, 8, 8)):
        with pytest.raises(BadImage) as refusal:
            call(REFUSED[name]())
        message = refusal.value.message
        assert message.startswith(("the image is", "the bytes are no"))
        assert "0x" not in message
        assert "/" not in message


@pytest.mark.parametrize("image_format", [generation_pb2.IMAGE_FORMAT_UNSPECIFIED, PNG, WEBP])
def test_lossless_formats_keep_every_pixel(image_format: generation_pb2.ImageFormat.ValueType) -> None:
    pixels = images.decode(saved(picture()), 0, 0).pixels
    encoded = images.encode(pixels, image_format, 100, {})
    assert images.decode(encoded, 0, 0).pixels == pixels


@pytest.mark.parametrize(("image_format", "name"), [(JPEG, "JPEG"), (WEBP, "WEBP")])
def test_quality_trades_bytes(image_format: generation_pb2.ImageFormat.ValueType, name: str) -> None:
    pixels = images.decode(saved(picture(200, 200)), 0, 0).pixels
    low, high = (images.encode(pixels, image_format, quality, {}) for quality in (20, 95))
    assert len(low) < len(high) / 2
    assert Image.open(io.BytesIO(low)).format == name


def test_a_png_carries_text_of_any_kind() -> None:
    text = {"bottega": '{"prompt": "ein roter Stern"}', "parameters": "星 — étoile\nSteps: 3"}
    encoded = images.encode(images.decode(saved(picture()), 0, 0).pixels, PNG, 90, text)
    with Image.open(io.BytesIO(encoded)) as image:
        assert image.text == text  # type: ignore[attr-defined]


@pytest.mark.parametrize("image_format", [PNG, JPEG, WEBP])
def test_the_same_picture_is_the_same_bytes_in_whatever_order_its_text_comes(
    image_format: generation_pb2.ImageFormat.ValueType,
) -> None:
    pixels = images.decode(saved(picture()), 0, 0).pixels
    text = {"bottega": "{}", "parameters": "a star", "a third": "one"}
    forwards, backwards = text, dict(reversed(text.items()))
    assert images.encode(pixels, image_format, 90, forwards) == images.encode(pixels, image_format, 90, backwards)
