"""Images that are small to send and long to decode, and those at the very bounds of what is taken. Made, never kept.

Each maker says how many of what it makes, so that a test can ask for one more than is taken.
"""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Sequence

from PIL import Image

SIDE = 4096
# Inflates to just under what Pillow allows one text; the last four bytes are the checksum.
_MIB = zlib.compress(bytes(2**20 - 100), 9)
_DAMAGED_MIB = _MIB[:-4] + b"\0\0\0\1"
_EXIF_TAG = 0x9286
# SOF9: sequential, with arithmetic codes.
_ARITHMETIC = 0xC9


def saved(image: Image.Image, name: str = "PNG", **options: object) -> bytes:
    """The image as a file of that format."""
    out = io.BytesIO()
    image.save(out, name, **options)
    return out.getvalue()


def scans(count: int, *, side: int = SIDE, components: Sequence[int] = (1,), refine: bool = False) -> bytes:
    """A progressive JPEG with so many scans after its header, each of a few bytes that say "nothing changes".

    refine: they look at every coefficient again, which costs ten times as much.
    """
    runs = side * side // 64 // 32_767 + 1
    bits = ("0" + "1" * 14) * runs  # "the next 32,767 blocks have nothing"
    bits += "1" * (-len(bits) % 8)
    data = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    table = segment(0xC4, bytes([0x10, 1, *[0] * 15, 0xE0]))
    if len(components) > 1:  # only the first coefficient of a block may be of several components
        scan = _scan(components, first=0, last=0, high=int(refine), low=1 - refine)
    else:
        scan = _scan(components, first=1, last=63, high=int(refine), low=1 - refine) + data
    return _progressive_header(side) + table + scan * count + b"\xff\xd9"


def jpeg_with(parts: bytes) -> bytes:
    """A small JPEG with these bytes behind its first segment, which says that it is one."""
    image = saved(Image.new("RGB", (64, 64), "aqua"), "JPEG")
    return image[:20] + parts + image[20:]


def segments(count: int, marker: int = 0xFE, body: bytes = b"") -> bytes:
    """A small JPEG with so many segments too many."""
    return jpeg_with(segment(marker, body) * count)


def exif_segments(count: int, size: int) -> bytes:
    """A small JPEG whose EXIF is in so many parts, of so many bytes each, which Pillow joins one by one."""
    return segments(count, 0xE1, b"Exif\0\0" + bytes(size))


def arithmetic() -> bytes:
    """A JPEG of 16 megapixels with arithmetic codes, which go on for ever where bytes end."""
    frame = struct.pack(">BHHB", 8, SIDE, SIDE, 3) + b"".join(bytes([number, 0x11, 0]) for number in (1, 2, 3))
    tables = segment(0xDB, bytes([0, *[1] * 64]))
    return b"\xff\xd8" + tables + segment(_ARITHMETIC, frame) + _scan((1, 2, 3), first=0, last=63) + b"\x55" * 2000


def png_with(before: bytes = b"", after: bytes = b"") -> bytes:
    """A small PNG with these chunks before its pixels, and behind them."""
    image = saved(Image.new("RGB", (64, 64), "aqua"))
    pixels, end = image.index(b"IDAT") - 4, image.index(b"IEND") - 4
    return image[:pixels] + before + image[pixels:end] + after + image[end:]


def compressed_texts(count: int) -> bytes:
    """A small PNG with so many damaged texts of a MiB each, of which Pillow does not count what it has inflated."""
    return png_with(chunk(b"zTXt", b"a\0\0" + _DAMAGED_MIB) * count)


def colour_profiles(count: int) -> bytes:
    """A small PNG with so many colour profiles of a MiB each."""
    return png_with(chunk(b"iCCP", b"a\0\0" + _MIB) * count)


def chunks(count: int) -> bytes:
    """A small PNG with so many chunks too many, behind its pixels."""
    return png_with(after=chunk(b"abCd", b"") * count)


def tiny_pixel_chunks(count: int) -> bytes:
    """A small PNG whose pixels are in so many chunks, most of them empty."""
    return png_with(chunk(b"IDAT", b"") * count)


@functools.cache
def png_of(width: int, height: int, *, interlaced: bool = False) -> bytes:
    """A PNG of that size with 16 bits for each of four channels, and with the filter that takes longest."""
    passes = [(0, 0, 1, 1)]
    if interlaced:
        passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    packer = zlib.compressobj(1)
    packed = []
    for left, top, across, down in passes:
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        packed += [packer.compress(b"\4" + bytes(8 * columns)) for _ in range(rows)]
    header = struct.pack(">IIBBBBB", width, height, 16, 6, 0, 0, int(interlaced))
    pixels = chunk(b"IDAT", b"".join(packed) + packer.flush())
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def webp_with(count: int, kind: bytes = b"ABCD", body: bytes = b"") -> bytes:
    """A small WebP with so many chunks behind its pixels."""
    plain = saved(Image.new("RGB", (64, 64), "aqua"), "WEBP")[12:]
    extended = struct.pack("<4sIB3x", b"VP8X", 10, 0) + struct.pack("<I", 63)[:3] * 2
    whole = b"WEBP" + extended + plain + (kind + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)) * count
    return b"RIFF" + struct.pack("<I", len(whole)) + whole


def exif(entries: int, size: int) -> bytes:
    """A TIFF header with so many entries, each of which says that it has all of the `size` bytes."""
    entry = struct.pack(">HHII", _EXIF_TAG, 7, size, 0)
    return (b"MM\0*\0\0\0\x08" + struct.pack(">H", entries) + entry * entries).ljust(size, b"\0")


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def _scan(components: Sequence[int], *, first: int, last: int, high: int = 0, low: int = 0) -> bytes:
    tables = b"".join(bytes([component, 0]) for component in components)
    return segment(0xDA, bytes([len(components)]) + tables + bytes([first, last, high << 4 | low]))


@functools.cache
def _progressive_header(side: int) -> bytes:
    whole = saved(Image.new("RGB", (side, side)), "JPEG", progressive=True, subsampling=0)
    return whole[: whole.index(b"\xff\xda")]
