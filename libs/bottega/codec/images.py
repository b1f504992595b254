"""Decode and encode images, as Diffusers would, with Pillow.

Pure functions of bytes, meant to run in a codec process. They never repeat what a library said: a refusal
is in our own words.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping

from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from bottega.codec import structure
from bottega.codec.limits import (
    FORMATS,
    FORMATS_FOR_PEOPLE,
    MAX_EXIF_BYTES,
    MAX_IMAGE_BYTES,
    MAX_IMAGE_PIXELS,
    MAX_IMAGE_SIDE,
    check_number,
    check_pixels,
)
from bottega.codec.pixels import ImageSize, Pixels
from bottega.errors import BadImage
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import ImageFormat

# Half the time of zlib's default for 14 % more bytes (1024x1024, measured).
_PNG_LEVEL = 1
# Lossless WebP: 2.2 s at Pillow's default of 4, .08 s and 11 % more bytes at 0 (1024x1024, measured).
_WEBP_LOSSLESS_METHOD = 0


def inspect(data: bytes) -> ImageSize:
    """Decodes the image completely and says its size. Raises BadImage."""
    image, _mode = load(data, "RGB")
    return ImageSize(width=image.width, height=image.height)


def decode(data: bytes, width: int, height: int) -> Pixels:
    """Decodes as diffusers.utils.load_image does (turned as EXIF says, without alpha) and resizes as
    Diffusers' VaeImageProcessor does (Lanczos, the aspect ratio is not kept).

    width, height: in pixels; 0 keeps the image's own.
    One difference to Diffusers: 16-bit grey is scaled to 8 bits, where Pillow's convert clips it to white.
    Raises BadImage.
    """
    image, _mode = load(data, "RGB")
    try:
        if width and height:
            image = image.resize((width, height), Image.Resampling.LANCZOS)
        return Pixels(width=image.width, height=image.height, data=image.tobytes())
    except MemoryError:
        raise too_much_memory() from None


def encode(pixels: Pixels, image_format: ImageFormat.ValueType, quality: int, text: Mapping[str, str]) -> bytes:
    """Encodes pixels; see `encode_image`."""
    image = Image.frombytes("RGB", (pixels.width, pixels.height), pixels.data)
    return encode_image(image, image_format, quality, text)


def encode_image(
    image: Image.Image, image_format: ImageFormat.ValueType, quality: int, text: Mapping[str, str]
) -> bytes:
    """Encodes as PNG (also for UNSPECIFIED), JPEG or WebP; the same arguments give the same bytes.

    image: RGB; a colour profile that its `info` has goes along. quality: 1 to 100, of JPEG and WebP; 100 makes WebP
    lossless.
    text: by keyword (latin-1, 1 to 79 characters), goes into a PNG; the others carry none.
    """
    out, profile = io.BytesIO(), image.info.get("icc_profile")
    if image_format == generation_pb2.IMAGE_FORMAT_JPEG:
        # In full colour resolution: flat colours keep their edges.
        image.save(out, "JPEG", quality=quality, subsampling=0, icc_profile=profile)
    elif image_format == generation_pb2.IMAGE_FORMAT_WEBP and quality == 100:
        image.save(out, "WEBP", lossless=True, method=_WEBP_LOSSLESS_METHOD, icc_profile=profile)
    elif image_format == generation_pb2.IMAGE_FORMAT_WEBP:
        image.save(out, "WEBP", quality=quality, icc_profile=profile)
    else:
        image.save(out, "PNG", compress_level=_PNG_LEVEL, pnginfo=_png_text(text), icc_profile=profile)
    return out.getvalue()


def load(data: bytes, mode: str | None) -> tuple[Image.Image, str]:
    """The image, decoded, turned as EXIF says and in a mode of Pillow's, and the mode that it had (16-bit grey: L).

    mode: None is RGBA where the file has transparency, in a channel or as a colour, else RGB. Raises BadImage.
    """
    check_number(len(data), MAX_IMAGE_BYTES, "bytes")
    structure.check(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(data)
        _check(image)
        return _decoded(image, mode)


def too_much_memory() -> BadImage:
    """The refusal of an image for which there is not enough."""
    return BadImage("the image needs more memory than its decoder may have")


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise BadImage(f"the image is too large; at most {MAX_IMAGE_PIXELS} pixels are taken") from None
    except UnidentifiedImageError:
        raise BadImage(f"the bytes are no {FORMATS_FOR_PEOPLE} image") from None
    except MemoryError:
        raise too_much_memory() from None
    except Exception:  # noqa: BLE001 - Pillow's plugins raise whatever they meet in a broken file
        raise _broken() from None


def _check(image: Image.Image) -> None:
    """What the header tells, before the pixels are touched."""
    check_pixels(image.width, image.height)
    if max(image.size) > MAX_IMAGE_SIDE:
        raise BadImage(f"the image is {image.width}x{image.height}; at most {MAX_IMAGE_SIDE} pixels a side are taken")
    if image.format in {"PNG", "WEBP"} and getattr(image, "is_animated", False):
        raise BadImage("the image is animated; send a single picture")


def _decoded(image: Image.Image, mode: str | None) -> tuple[Image.Image, str]:
    try:
        image.load()
        mode = mode or ("RGBA" if image.has_transparency_data else "RGB")
        _check_exif(image)
        if image.mode.startswith("I;16") or image.mode == "I":
            image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        return ImageOps.exif_transpose(image).convert(mode), image.mode
    except BadImage:
        raise
    except MemoryError:
        raise too_much_memory() from None
    except Exception:  # noqa: BLE001 - see _open
        raise _broken() from None


def _check_exif(image: Image.Image) -> None:
    """Of a PNG that has it as text, which its structure does not tell: as it is, or as two digits a byte, deflated."""
    plain = image.info.get("exif", b"").removeprefix(b"Exif\0\0")
    size = len(plain) or len(image.info.get("Raw profile type exif", "")) // 2
    check_number(size, MAX_EXIF_BYTES, "bytes of EXIF")


def _png_text(text: Mapping[str, str]) -> PngInfo:
    info = PngInfo()
    # A protobuf map comes in another order in every process; the same picture shall be the same bytes in all.
    for keyword, value in sorted(text.items()):
        info.add_text(keyword, value)  # as tEXt, or as iTXt where the value is beyond latin-1
    return info


def _broken() -> BadImage:
    return BadImage(f"the image is not a complete, well-formed {FORMATS_FOR_PEOPLE} image")
