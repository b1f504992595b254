"""The structure of a WebP: the chunks of its RIFF container. Decodes nothing.

Source: RFC 9649, section 2.
"""

from __future__ import annotations

from bottega.codec.limits import MAX_EXIF_BYTES, MAX_IMAGE_PIXELS, MAX_WEBP_CHUNKS, check_number
from bottega.errors import BadImage

SIGNATURE = b"RIFF"

# "RIFF", the size of what follows, "WEBP".
_FIRST_CHUNK = 12
_HEADER_BYTES = 8
_EXTENDED, _LOSSY, _LOSSLESS, _FRAME, _EXIF = b"VP8X", b"VP8 ", b"VP8L", b"ANMF", b"EXIF"


def claimed_pixels(data: bytes) -> int:
    """By the header; 0 where it does not say. Never raises."""
    kind, body = data[12:16], data[20:30].ljust(10, b"\0")
    if kind == _EXTENDED:
        return (int.from_bytes(body[4:7], "little") + 1) * (int.from_bytes(body[7:10], "little") + 1)
    if kind == _LOSSY:
        return (int.from_bytes(body[6:8], "little") & 0x3FFF) * (int.from_bytes(body[8:10], "little") & 0x3FFF)
    if kind == _LOSSLESS:
        bits = int.from_bytes(body[1:5], "little")
        return ((bits & 0x3FFF) + 1) * ((bits >> 14 & 0x3FFF) + 1)
    return 0


def check(data: bytes) -> None:
    """Raises BadImage for more chunks, frames or EXIF than single pictures have."""
    check_number(claimed_pixels(data), MAX_IMAGE_PIXELS, "pixels")
    end = min(len(data), int.from_bytes(data[4:8], "little") + _HEADER_BYTES)  # libwebp reads no further
    at, frames = _FIRST_CHUNK, 0
    for _ in range(MAX_WEBP_CHUNKS):
        if at >= end:
            return
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        frames += kind == _FRAME
        if frames > 1:
            raise BadImage("the image is animated; send a single picture")
        if kind == _EXIF:
            check_number(size, MAX_EXIF_BYTES, "bytes of EXIF")
        at += _HEADER_BYTES + size + size % 2
    raise BadImage(f"the image has more than {MAX_WEBP_CHUNKS} WebP chunks; at most {MAX_WEBP_CHUNKS} are taken")
