"""The structure of a PNG: its chunks. Decodes nothing and checks no checksums.

Pillow reads chunks one by one, in Python, and inflates every text and every colour profile as it meets them, up to
1 MiB each. It counts what came out; of those that turn out to be damaged nothing, and 8,000 of them fit into 8 MiB.
Source: W3C's PNG specification, third edition, 5.3.
"""

from __future__ import annotations

from collections import Counter

from bottega.codec.limits import MAX_EXIF_BYTES, MAX_IMAGE_PIXELS, MAX_PNG_CHUNKS, MAX_PNG_TEXTS, check_number
from bottega.errors import BadImage

SIGNATURE = b"\x89PNG\r\n\x1a\n"

_HEADER = SIGNATURE + b"\0\0\0\x0dIHDR"
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_AT_MOST_ONCE = (b"IHDR", b"iCCP", b"eXIf")
# Length, kind and checksum.
_AROUND_BYTES = 12


def claimed_pixels(data: bytes) -> int:
    """By the header; 0 where there is none. Never raises."""
    start = len(_HEADER)
    if not data.startswith(_HEADER):
        return 0
    return int.from_bytes(data[start : start + 4], "big") * int.from_bytes(data[start + 4 : start + 8], "big")


def check(data: bytes) -> None:
    """Raises BadImage for more chunks, texts, profiles or EXIF than images have."""
    if not data.startswith(_HEADER):
        raise BadImage("the image is not a complete, well-formed PNG")
    check_number(claimed_pixels(data), MAX_IMAGE_PIXELS, "pixels")
    kinds: Counter[bytes] = Counter()
    at = len(SIGNATURE)
    for _ in range(MAX_PNG_CHUNKS):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        kinds[kind] += 1
        if kind == b"eXIf":
            check_number(size, MAX_EXIF_BYTES, "bytes of EXIF")
        at += size + _AROUND_BYTES
        if kind == b"IEND" or at >= len(data):
            _check_kinds(kinds)
            return
    raise BadImage(f"the image has more than {MAX_PNG_CHUNKS} PNG chunks; at most {MAX_PNG_CHUNKS} are taken")


def _check_kinds(kinds: Counter[bytes]) -> None:
    check_number(sum(kinds[kind] for kind in _TEXTS), MAX_PNG_TEXTS, "PNG texts")
    for kind in _AT_MOST_ONCE:
        if kinds[kind] > 1:
            raise BadImage(f"the image has {kinds[kind]} PNG chunks {kind.decode()}; at most 1 is taken")
