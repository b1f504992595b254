"""Decodes and encodes images with Pillow, as Diffusers would.

The functions are pure, and run in a codec process. Their errors never repeat the text of a library.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from bottega.codec import structure
from bottega.codec.metadata import exif_with, jpeg_segments_with
from bottega.codec.pixels import DecodedImage, ImageFacts, ImageSize, Pixels
from bottega.codec.structure import (
    FORMATS,
    FORMATS_FOR_PEOPLE,
    MAX_EXIF_BYTES,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    MAX_IMAGE_SIDE,
    check_number,
    check_pixels,
)
from bottega.errors import BadImage
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import ImageFormat

# Pillow's modes of files whose colours are red, green and blue.
_RGB_MODES = frozenset({"RGB", "RGBA", "P", "PA"})
# Half the time of zlib's default for 14 % more bytes (1024x1024, measured).
_PNG_LEVEL = 1
# Lossless WebP: 2.2 s at Pillow's default of 4, .08 s and 11 % more bytes at 0 (1024x1024, measured).
_WEBP_LOSSLESS_METHOD = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedImage:
    """A decoded image, after the rotation in its EXIF data."""

    colours: Image.Image
    """RGB colours, as if all pixels were opaque, like diffusers.utils.load_image."""
    alpha: Image.Image | None
    """Opacity in mode L, from a channel or from a transparent colour; None if every pixel is opaque."""
    facts: ImageFacts


def inspect(data: bytes) -> ImageSize:
    """Decode the image completely and return its size. Raise BadImage if that is impossible."""
    image, _mode = load(data, "RGB")
    return ImageSize(width=image.width, height=image.height)


def decode(data: bytes, width: int, height: int) -> DecodedImage:
    """Decode an image as diffusers.utils.load_image does, and resize it as Diffusers' VaeImageProcessor does.

    The rotation in its EXIF data is applied, transparency is ignored, and the aspect ratio is not kept. One difference
    from Diffusers: 16-bit grey is scaled to 8 bits, where Pillow's convert clips it to white.

    Args:
        width: Width in pixels; 0 keeps the image's own.
        height: Height in pixels; 0 keeps the image's own.

    Raises:
        BadImage: The image cannot be decoded.
    """
    loaded = load_image(data)
    image = loaded.colours
    try:
        if width and height:
            image = image.resize((width, height), Image.Resampling.LANCZOS)
        pixels = Pixels(width=image.width, height=image.height, data=image.tobytes())
        return DecodedImage(pixels=pixels, facts=loaded.facts)
    except MemoryError:
        raise too_much_memory() from None


def encode(pixels: Pixels, image_format: ImageFormat.ValueType, quality: int, text: Mapping[str, str]) -> bytes:
    """Encode pixels; see `encode_image`."""
    image = Image.frombytes("RGB", (pixels.width, pixels.height), pixels.data)
    return encode_image(image, image_format, quality, text)


def encode_image(
    image: Image.Image, image_format: ImageFormat.ValueType, quality: int, text: Mapping[str, str]
) -> bytes:
    """Encode an image as PNG (also for UNSPECIFIED), JPEG or WebP; the same arguments give the same bytes.

    Args:
        image: RGB or RGBA; JPEG drops the opacity. The colour profile in its `info` is kept.
        quality: Quality of JPEG and WebP, 1 to 100; 100 makes WebP lossless.
        text: Texts to write into the file by keyword; see `bottega.codec.metadata`. JPEG and WebP have room for
            Bottega's own only, a PNG for any (keywords: latin-1, 1 to 79 characters).
    """
    out, profile = io.BytesIO(), image.info.get("icc_profile")
    is_jpeg = image_format == generation_pb2.IMAGE_FORMAT_JPEG
    exif = exif_with(text, is_jpeg=is_jpeg) if is_jpeg or image_format == generation_pb2.IMAGE_FORMAT_WEBP else b""
    if is_jpeg:
        # In full colour resolution: flat colours keep their edges.
        extra = jpeg_segments_with(text, exif)
        options = {"quality": quality, "subsampling": 0, "icc_profile": profile, "exif": exif, "extra": extra}
        image.convert("RGB").save(out, "JPEG", **options)
    elif image_format == generation_pb2.IMAGE_FORMAT_WEBP and quality == 100:
        # exact: the colours of transparent pixels stay.
        image.save(out, "WEBP", lossless=True, method=_WEBP_LOSSLESS_METHOD, exact=True, icc_profile=profile, exif=exif)
    elif image_format == generation_pb2.IMAGE_FORMAT_WEBP:
        image.save(out, "WEBP", quality=quality, exact=True, icc_profile=profile, exif=exif)
    else:
        image.save(out, "PNG", compress_level=_PNG_LEVEL, pnginfo=_png_text(text), icc_profile=profile)
    return out.getvalue()


def load(data: bytes, mode: str | None) -> tuple[Image.Image, str]:
    """Return the decoded image, rotated and converted, and its original Pillow mode (L for 16-bit grey).

    Args:
        mode: Mode to convert to. None is RGBA if the file has transparency, in a channel or as a colour, else RGB.

    Raises:
        BadImage: The image cannot be decoded.
    """
    with _decoding(data) as image:
        mode = mode or ("RGBA" if image.has_transparency_data else "RGB")
        turned = _turned(image)
        return turned.convert(mode), turned.mode


def load_image(data: bytes) -> LoadedImage:
    """Return the colours, the opacity and the properties of an image.

    Raises:
        BadImage: The image cannot be decoded.
    """
    with _decoding(data) as image:
        turned = _turned(image)
        alpha = turned.convert("RGBA").getchannel("A") if turned.has_transparency_data else None
        if alpha is not None and alpha.getextrema() == (255, 255):
            alpha = None
        profile = image.info.get("icc_profile") if turned.mode in _RGB_MODES else None
        facts = ImageFacts(
            size=ImageSize(width=turned.width, height=turned.height),
            transparent=alpha is not None,
            scaled_from_16_bits=_has_16_bits(image),
            icc_profile=profile or b"",
        )
        return LoadedImage(colours=turned.convert("RGB"), alpha=alpha, facts=facts)


def too_much_memory() -> BadImage:
    """Return the error for an image that needs more memory than the codec process may use."""
    return BadImage("the image needs more memory than its decoder may have")


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise BadImage(f"the image is too large; at most {MAX_IMAGE_PIXELS} pixels are accepted") from None
    except UnidentifiedImageError:
        raise BadImage(f"the bytes are not a {FORMATS_FOR_PEOPLE} image") from None
    except MemoryError:
        raise too_much_memory() from None
    except Exception:  # noqa: BLE001 - Pillow's plugins raise whatever they meet in a broken file
        raise _broken() from None


def _check(image: Image.Image) -> None:
    """Check the size and the format in the header, before pixels are decoded."""
    check_pixels(image.width, image.height)
    if max(image.size) > MAX_IMAGE_SIDE:
        raise BadImage(
            f"the image is {image.width}x{image.height}; at most {MAX_IMAGE_SIDE} pixels a side are accepted"
        )
    if image.format in {"PNG", "WEBP"} and getattr(image, "is_animated", False):
        raise BadImage("the image is animated; send a single picture")


@contextmanager
def _decoding(data: bytes) -> Iterator[Image.Image]:
    """Yield an image whose pixels are decoded. Convert errors in the `with` block to BadImage as well."""
    check_number(len(data), MAX_IMAGE_BYTES, "bytes")
    structure.check(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(data)
        _check(image)
        try:
            image.load()
            _check_exif(image)
            yield image
        except BadImage:
            raise
        except MemoryError:
            raise too_much_memory() from None
        except Exception:  # noqa: BLE001 - see _open
            raise _broken() from None


def _turned(image: Image.Image) -> Image.Image:
    """Return the image after the rotation in its EXIF data, with 8 bits per channel."""
    if _has_16_bits(image):
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return ImageOps.exif_transpose(image)


def _has_16_bits(image: Image.Image) -> bool:
    return image.mode.startswith("I;16") or image.mode == "I"


def _check_exif(image: Image.Image) -> None:
    """Check EXIF data that a PNG has as text, plain or deflated with two digits per byte, which `structure` misses."""
    plain = image.info.get("exif", b"").removeprefix(b"Exif\0\0")
    size = len(plain) or len(image.info.get("Raw profile type exif", "")) // 2
    check_number(size, MAX_EXIF_BYTES, "bytes of EXIF")


def _png_text(text: Mapping[str, str]) -> PngInfo:
    info = PngInfo()
    # The order of a protobuf map differs between processes; the same picture must be the same bytes in all.
    for keyword, value in sorted(text.items()):
        info.add_text(keyword, value)  # as tEXt, or as iTXt where the value is beyond latin-1
    return info


def _broken() -> BadImage:
    return BadImage(f"the image is not a complete, well-formed {FORMATS_FOR_PEOPLE} image")
