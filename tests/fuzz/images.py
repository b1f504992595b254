"""Encoded images of every sad kind, and a few good ones: small files all, but for the one that is too large."""

from __future__ import annotations

import functools
import random
import struct
import zlib
from collections.abc import Mapping

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from bottega.codec import structure
from tests.samples import hostile_images as hostile
from tests.samples.hostile_images import saved

_SIDE = 64
# What the gateway takes by default.
_MOST_BYTES = 8 << 20
# Inflates to far more than a picture of this size may carry beside its pixels.
_TEXT_BYTES = 64 << 20


@functools.cache
def good_images() -> Mapping[str, bytes]:
    """Those that are drawn from. As masks, all redraw something: a worker may refuse an empty one late or early."""
    picture = _picture()
    return {
        "png": saved(picture),
        "jpeg": saved(picture, "JPEG"),
        "webp": saved(picture, "WEBP"),
        "one pixel": saved(Image.new("RGB", (1, 1), "white")),
        "palette with alpha": saved(picture.convert("P"), transparency=0),
        "cmyk": saved(picture.convert("CMYK"), "JPEG"),
        "a thin line": saved(Image.new("1", (structure.MAX_IMAGE_SIDE, 1), 1)),
        "progressive jpeg": saved(picture, "JPEG", progressive=True),
        "as many scans as may be": hostile.scans(structure.MAX_JPEG_SCANS, side=_SIDE),
        "as many texts as may be": hostile.png_with(hostile.chunk(b"tEXt", b"a\0b") * structure.MAX_PNG_TEXTS),
    }


@functools.cache
def bad_images() -> Mapping[str, bytes]:
    png, jpeg, webp = (saved(_picture(), name) for name in ("PNG", "JPEG", "WEBP"))
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green")]
    noise = random.Random(7).randbytes(500)
    return {
        "empty": b"",
        "text": b"GET / HTTP/1.1\r\n\r\n",
        "noise": noise,
        "a signature": png[:8],
        "truncated png": png[:-40],
        "truncated jpeg": jpeg[: len(jpeg) // 2],
        "truncated webp": webp[: len(webp) // 2],
        "noise in a png": png[:60] + noise + png[60:],
        "header of a bomb": png_of_size(50_000, 50_000),
        "sides of no size": png_of_size(0, 0),
        "sides beyond signs": png_of_size(2**31 - 1, 2**31 - 1),
        "pixels missing": png_of_size(100, 100),
        "one row too many": saved(Image.new("1", (4096, 4097))),
        "text bomb": _text_bomb(),
        **_hostile_images(),
        "animated png": saved(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "animated webp": saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "gif": saved(frames[0], "GIF"),
        "tiff": saved(frames[0], "TIFF"),
        "bmp": saved(frames[0], "BMP"),
        "icon": saved(frames[0], "ICO"),
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(/etc/passwd) run\n",
        "pdf": b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF",
        "zip": b"PK\x03\x04" + bytes(26),
    }


def some_good_images() -> Mapping[str, bytes]:
    """Some for fields whose images are read as those of others are."""
    return {name: good_images()[name] for name in ("png", "one pixel")} | {"the largest": largest_image()}


def some_bad_images() -> Mapping[str, bytes]:
    """Some for fields whose images are read as those of others are."""
    few = ("empty", "text", "header of a bomb", "truncated png", "animated webp", "gif")
    return {name: bad_images()[name] for name in few} | {"too large": too_large_image()}


@functools.cache
def largest_image() -> bytes:
    """A good picture with as many bytes behind it as may be."""
    return saved(_picture()).ljust(_MOST_BYTES, b"\0")


def too_large_image() -> bytes:
    """The same with one byte more."""
    return largest_image() + b"\0"


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that claims to be of that size, with next to no pixels in it."""
    header = hostile.chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = hostile.chunk(b"IDAT", zlib.compress(bytes(99)))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + hostile.chunk(b"IEND", b"")


def _picture() -> Image.Image:
    return Image.frombytes("RGB", (_SIDE, _SIDE), random.Random(3).randbytes(_SIDE * _SIDE * 3))


def _hostile_images() -> Mapping[str, bytes]:
    """One more than is taken of what costs a decoder time each: small files, and all but the first quick to decode."""
    return {
        "scans of the largest size": hostile.scans(3000, refine=True),
        "one scan too many": hostile.scans(structure.MAX_JPEG_SCANS + 1, side=_SIDE),
        "one segment too many": hostile.segments(structure.MAX_JPEG_SEGMENTS),
        "one stray byte too many": hostile.jpeg_with(bytes(structure.MAX_JPEG_STRAY_BYTES + 1)),
        "arithmetic codes": hostile.arithmetic(),
        "one text too many": hostile.compressed_texts(structure.MAX_PNG_TEXTS + 1),
        "two colour profiles": hostile.colour_profiles(2),
        "one chunk too many": hostile.chunks(structure.MAX_PNG_CHUNKS),
        "one webp chunk too many": hostile.webp_with(structure.MAX_WEBP_CHUNKS),
        "one pixel too long": saved(Image.new("1", (structure.MAX_IMAGE_SIDE + 1, 1))),
    }


def _text_bomb() -> bytes:
    text = PngInfo()
    text.add_text("comment", "x" * _TEXT_BYTES, zip=True)
    return saved(_picture(), pnginfo=text)
