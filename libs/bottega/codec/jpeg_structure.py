"""The structure of a JPEG: its segments and scans, found as libjpeg and Pillow find them. Decodes nothing.

A progressive JPEG is decoded scan by scan, and every scan visits every pixel, though it may have but ten bytes:
150,000 of them fit into 1.5 MB. Segments cost time each as well, and Pillow joins those of EXIF one by one.
Source: ITU-T T.81, annex B.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from bottega.codec.limits import (
    MAX_EXIF_BYTES,
    MAX_JPEG_SCANS,
    MAX_JPEG_SEGMENTS,
    MAX_JPEG_STRAY_BYTES,
    MAX_JPEG_VISITS,
    check_number,
    check_pixels,
)
from bottega.errors import BadImage

SIGNATURE = b"\xff\xd8\xff"

_EOI, _SOS, _APP1 = 0xD9, 0xDA, 0xE1
_PROGRESSIVE = 0xC2
# Baseline, extended and progressive, with Huffman's codes: what browsers show. The others (arithmetic codes, lossless,
# hierarchical) have decoders that hardly anybody uses.
_TAKEN_FRAMES = frozenset({0xC0, 0xC1, _PROGRESSIVE})
_OTHER_FRAMES = frozenset({0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
# At which libjpeg gives up: a second start, and what is reserved.
_NEVER = frozenset({0xC8, 0xD8, 0xDE, 0xDF, *range(0xF0, 0xFE)})
# With a length. Below C0 and D0 to D7 (restarts, any number of which may be among the pixels) are no segments.
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
_EXIF = b"Exif\0\0"
# Of a segment, all that is looked at.
_HEAD_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """head: the first bytes of its body, whose bytes are `size` in all."""

    marker: int
    head: bytes
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    pixels: int
    components: int
    progressive: bool


def claimed_pixels(data: bytes) -> int:
    """By the header; four times as many of a progressive one. 0 where it does not say. Raises BadImage."""
    for segment in _segments(data):
        if segment.marker in _TAKEN_FRAMES:
            frame = _frame(segment)
            return frame.pixels * (4 if frame.progressive else 1)
        if segment.marker == _SOS:
            return 0
    return 0


def check(data: bytes) -> None:
    """Raises BadImage for more segments, scans, EXIF or work than images have, and for kinds that are not taken."""
    frame = _Frame(pixels=0, components=0, progressive=False)
    scans = visits = exif_bytes = 0
    for segment in _segments(data):
        if segment.marker in _TAKEN_FRAMES:
            frame = _frame(segment)
        elif segment.marker == _SOS:
            scans += 1
            components = segment.head[0] if segment.head else 0
            visits += components * frame.pixels
            _check_work(scans, visits)
            if not frame.progressive and components == frame.components:
                return  # libjpeg reads no further
        elif segment.marker == _APP1 and segment.head.startswith(_EXIF):
            exif_bytes += segment.size
            check_number(exif_bytes, MAX_EXIF_BYTES, "bytes of EXIF or more")


def _segments(data: bytes) -> Iterator[_Segment]:
    """All up to the end of the image, each with its body. Raises BadImage."""
    at, stray, header = len(SIGNATURE) - 1, 0, True
    for _ in range(MAX_JPEG_SEGMENTS):
        # In the header Pillow looks at stray bytes one by one; among the pixels everything is stray, and nobody does.
        found = _MARKER.search(data, at, at + MAX_JPEG_STRAY_BYTES - stray + 2 if header else len(data))
        if header:
            stray += (found.start() if found else len(data)) - at
            check_number(stray, MAX_JPEG_STRAY_BYTES, "bytes or more between its JPEG segments")
        if found is None:
            return
        marker, start = data[found.end() - 1], found.end()
        if marker in _NEVER or (marker == _EOI and header):
            raise BadImage("the image is not a complete, well-formed JPEG")
        if marker in _OTHER_FRAMES:
            raise BadImage(
                "the image is an arithmetic-coded, lossless or hierarchical JPEG; baseline and progressive are taken"
            )
        if marker == _EOI:
            return
        at = start + max(2, int.from_bytes(data[start : start + 2], "big"))
        header = header and marker != _SOS
        yield _Segment(marker=marker, head=data[start + 2 : min(at, start + 2 + _HEAD_BYTES)], size=at - start - 2)
    raise BadImage(f"the image has more than {MAX_JPEG_SEGMENTS} JPEG segments; at most {MAX_JPEG_SEGMENTS} are taken")


def _frame(segment: _Segment) -> _Frame:
    head = segment.head.ljust(6, b"\0")
    height, width = int.from_bytes(head[1:3], "big"), int.from_bytes(head[3:5], "big")
    check_pixels(width, height)
    return _Frame(pixels=width * height, components=head[5], progressive=segment.marker == _PROGRESSIVE)


def _check_work(scans: int, visits: int) -> None:
    check_number(scans, MAX_JPEG_SCANS, "JPEG scans or more")
    if visits > MAX_JPEG_VISITS:
        raise BadImage(
            f"the image's {scans} JPEG scans or more visit its pixels {visits} times in all; at most {MAX_JPEG_VISITS} "
            "are taken: send it smaller, or baseline"
        )
