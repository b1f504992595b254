"""Limits on images, and checks of the structure of PNG, JPEG and WebP files before a decoder reads them.

The formats are those whose decoders read untrusted files every day. Limits on bytes and pixels do not bound the time of
decoding, so there is a limit on the number of everything that costs a decoder time.

A small file can make a decoder work for minutes. A progressive JPEG is decoded scan by scan, and every scan visits
every pixel though it may have ten bytes: 150,000 scans fit into 1.5 MB. Pillow joins the EXIF segments of a JPEG one by
one. It also reads the chunks of a PNG one by one, in Python, and inflates every text and every colour profile to up to
1 MiB; it does not count those that turn out to be damaged, and 8,000 of them fit into 8 MiB.

The checks read the file at most once, never its pixels, and verify no checksums. Other damage is left to the decoder.
Sources: W3C's PNG specification, third edition, 5.3; ITU-T T.81, annex B; RFC 9649, section 2.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bottega.errors import BadImage

# A PNG of a photograph at 3 megapixels; a message of 24 MiB carries one with a mask and a control image.
MAX_IMAGE_BYTES = 8 * 2**20
# Four times the pixels of the largest picture that the suite draws by default.
MAX_IMAGE_PIXELS = 16 * 2**20
# WebP's own. Resizing an image of 16 million by 1 pixels took 4 s and .9 GiB.
MAX_IMAGE_SIDE = 16_384
# Pillow's names.
FORMATS = ("PNG", "JPEG", "WEBP")
FORMATS_FOR_PEOPLE = "PNG, JPEG or WebP"

# libjpeg's progressive encoder writes 10 scans, or 18 for four components; mozjpeg tries 64 and keeps some of them.
# One scan of 16 megapixels costs up to 13 ms, however few bytes it has.
MAX_JPEG_SCANS = 100
# Pixels times components, summed over all scans. libjpeg's 10 scans visit a component 14 times, 2**28 for the largest
# image; this is twice that, and costs .4 s at most.
MAX_JPEG_VISITS = 2**29
# All segments but pixels and scans: the longest colour profile takes 128, and a scan has a few tables.
MAX_JPEG_SEGMENTS = 1024
# Bytes between the segments before the pixels: padding, and those of broken cameras. Pillow reads them one by one.
MAX_JPEG_STRAY_BYTES = 64 * 2**10
# libpng writes a chunk for every 8 KiB; this allows one for every 512 bytes.
MAX_PNG_CHUNKS = 16 * 2**10
# Each may inflate to 1 MiB (Pillow's limit), which takes about 2 ms. Editors write about ten.
MAX_PNG_TEXTS = 128
# A WebP of one picture has at most eight kinds of chunks, besides unknown ones.
MAX_WEBP_CHUNKS = 256
# Cameras write less than 64 KiB, which is the size of one JPEG segment.
MAX_EXIF_BYTES = 2**20

# Address space of one codec process: the interpreter (about .2 GiB), the largest image encoded, decoded with four
# channels and rotated, and two copies of its frame.
ADDRESS_SPACE_BYTES = 1 * 2**30
# CPU seconds of decoding and resizing one image. The worst that passes the bounds above took 1.1 s on two shared
# x86-64 cores (an interlaced PNG of 16 megapixels with 16 bits a channel); the rest is for slower machines.
DECODE_CPU_S = 5
# CPU seconds of decoding both images of an edit, with the mask made grey and both resized. With 16 megapixels each it
# took 3.4 s beside other work.
DECODE_EDIT_CPU_S = 10
# CPU seconds of encoding one of our own pictures: 16 megapixels of lossless WebP take 16 s. The caller's deadline
# usually ends a longer call; this limit also holds without a caller.
ENCODE_CPU_S = 60
# Pixels above which an image counts as large, and may have to wait longer than others: those of the largest picture
# that the suite draws by default.
LARGE_PIXELS = 4 * 2**20
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_HEADER = _PNG_SIGNATURE + b"\0\0\0\x0dIHDR"
_PNG_TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
_PNG_SINGLE_CHUNKS = (b"IHDR", b"iCCP", b"eXIf")
# Length, type and checksum of a chunk.
_PNG_FRAMING_BYTES = 12

_JPEG_SIGNATURE = b"\xff\xd8\xff"
_EOI, _SOS, _APP1 = 0xD9, 0xDA, 0xE1
_PROGRESSIVE = 0xC2
# Baseline, extended and progressive frames with Huffman codes, which browsers show. The decoders of the others
# (arithmetic codes, lossless, hierarchical) are hardly ever used.
_ACCEPTED_FRAMES = frozenset({0xC0, 0xC1, _PROGRESSIVE})
_OTHER_FRAMES = frozenset({0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
# Markers at which libjpeg gives up: a second start of image, and reserved ones.
_INVALID_MARKERS = frozenset({0xC8, 0xD8, 0xDE, 0xDF, *range(0xF0, 0xFE)})
# Markers of segments that have a length. Those below C0, and D0 to D7 (restarts among the pixels), have none.
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
_JPEG_EXIF = b"Exif\0\0"
# Bytes of a segment that are read.
_JPEG_HEAD_BYTES = 16

_WEBP_SIGNATURE = b"RIFF"
# "RIFF", the size of what follows, "WEBP".
_WEBP_FIRST_CHUNK = 12
_WEBP_HEADER_BYTES = 8
_EXTENDED, _LOSSY, _LOSSLESS, _ANIMATION_FRAME, _WEBP_EXIF = b"VP8X", b"VP8 ", b"VP8L", b"ANMF", b"EXIF"


def check_number(found: int, most: int, what: str) -> None:
    """Raise BadImage if an image has more than `most` of something.

    Args:
        what: What is counted, in the plural, for the error, such as "pixels".
    """
    if found > most:
        raise BadImage(f"the image has {found} {what}; at most {most} are accepted")


def check_pixels(width: int, height: int) -> None:
    """Raise BadImage if an image has more pixels than are accepted."""
    if width * height > MAX_IMAGE_PIXELS:
        raise BadImage(f"the image is {width}x{height}; at most {MAX_IMAGE_PIXELS} pixels are accepted")


def check(data: bytes) -> None:
    """Raise BadImage if a file has more chunks, segments or scans than the limits allow. The error names the limit."""
    for image_format in _FORMATS:
        if data.startswith(image_format.signature):
            image_format.check(data)


def claimed_pixels(data: bytes) -> int:
    """Return how many pixels a decoder would process, from the header; 0 for a file that `check` refuses.

    This takes some milliseconds at most. The pixels of a progressive JPEG count four times, because every scan visits
    them.
    """
    for image_format in _FORMATS:
        if data.startswith(image_format.signature):
            try:
                return image_format.claimed_pixels(data)
            except BadImage:
                return 0
    return 0


def _png_pixels(data: bytes) -> int:
    start = len(_PNG_HEADER)
    if not data.startswith(_PNG_HEADER):
        return 0
    return int.from_bytes(data[start : start + 4], "big") * int.from_bytes(data[start + 4 : start + 8], "big")


def _check_png(data: bytes) -> None:
    if not data.startswith(_PNG_HEADER):
        raise BadImage("the image is not a complete, well-formed PNG")
    check_number(_png_pixels(data), MAX_IMAGE_PIXELS, "pixels")
    kinds: Counter[bytes] = Counter()
    at = len(_PNG_SIGNATURE)
    for _ in range(MAX_PNG_CHUNKS):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        kinds[kind] += 1
        if kind == b"eXIf":
            check_number(size, MAX_EXIF_BYTES, "bytes of EXIF")
        at += size + _PNG_FRAMING_BYTES
        if kind == b"IEND" or at >= len(data):
            _check_png_chunks(kinds)
            return
    raise BadImage(f"the image has more than {MAX_PNG_CHUNKS} PNG chunks; at most {MAX_PNG_CHUNKS} are accepted")


def _check_png_chunks(kinds: Counter[bytes]) -> None:
    check_number(sum(kinds[kind] for kind in _PNG_TEXT_CHUNKS), MAX_PNG_TEXTS, "PNG texts")
    for kind in _PNG_SINGLE_CHUNKS:
        if kinds[kind] > 1:
            raise BadImage(f"the image has {kinds[kind]} PNG chunks {kind.decode()}; at most 1 is accepted")


@dataclass(frozen=True, slots=True, kw_only=True)
class _JpegSegment:
    """A segment of a JPEG."""

    marker: int
    head: bytes
    """The first bytes of the body."""
    size: int
    """Length of the body in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _JpegFrame:
    pixels: int
    components: int
    progressive: bool


def _jpeg_pixels(data: bytes) -> int:
    """Return `claimed_pixels` of a JPEG; 0 if the header has no frame. Raise BadImage if it is malformed."""
    for segment in _jpeg_segments(data):
        if segment.marker in _ACCEPTED_FRAMES:
            frame = _jpeg_frame(segment)
            return frame.pixels * (4 if frame.progressive else 1)
        if segment.marker == _SOS:
            return 0
    return 0


def _check_jpeg(data: bytes) -> None:
    frame = _JpegFrame(pixels=0, components=0, progressive=False)
    scans = visits = exif_bytes = 0
    for segment in _jpeg_segments(data):
        if segment.marker in _ACCEPTED_FRAMES:
            frame = _jpeg_frame(segment)
        elif segment.marker == _SOS:
            scans += 1
            components = segment.head[0] if segment.head else 0
            visits += components * frame.pixels
            _check_jpeg_work(scans, visits)
            if not frame.progressive and components == frame.components:
                return  # libjpeg reads no further
        elif segment.marker == _APP1 and segment.head.startswith(_JPEG_EXIF):
            exif_bytes += segment.size
            check_number(exif_bytes, MAX_EXIF_BYTES, "bytes of EXIF or more")


def _jpeg_segments(data: bytes) -> Iterator[_JpegSegment]:
    """Yield the segments up to the end of the image, as libjpeg and Pillow find them. Raise BadImage."""
    at, stray, header = len(_JPEG_SIGNATURE) - 1, 0, True
    for _ in range(MAX_JPEG_SEGMENTS):
        # In the header, Pillow reads stray bytes one by one. After it, all pixels would count as stray bytes.
        found = _MARKER.search(data, at, at + MAX_JPEG_STRAY_BYTES - stray + 2 if header else len(data))
        if header:
            stray += (found.start() if found else len(data)) - at
            check_number(stray, MAX_JPEG_STRAY_BYTES, "bytes or more between its JPEG segments")
        if found is None:
            return
        marker, start = data[found.end() - 1], found.end()
        if marker in _INVALID_MARKERS or (marker == _EOI and header):
            raise BadImage("the image is not a complete, well-formed JPEG")
        if marker in _OTHER_FRAMES:
            raise BadImage(
                "the image is an arithmetic-coded, lossless or hierarchical JPEG; baseline and progressive are accepted"
            )
        if marker == _EOI:
            return
        at = start + max(2, int.from_bytes(data[start : start + 2], "big"))
        header = header and marker != _SOS
        head = data[start + 2 : min(at, start + 2 + _JPEG_HEAD_BYTES)]
        yield _JpegSegment(marker=marker, head=head, size=at - start - 2)
    raise BadImage(
        f"the image has more than {MAX_JPEG_SEGMENTS} JPEG segments; at most {MAX_JPEG_SEGMENTS} are accepted"
    )


def _jpeg_frame(segment: _JpegSegment) -> _JpegFrame:
    head = segment.head.ljust(6, b"\0")
    height, width = int.from_bytes(head[1:3], "big"), int.from_bytes(head[3:5], "big")
    check_pixels(width, height)
    return _JpegFrame(pixels=width * height, components=head[5], progressive=segment.marker == _PROGRESSIVE)


def _check_jpeg_work(scans: int, visits: int) -> None:
    check_number(scans, MAX_JPEG_SCANS, "JPEG scans or more")
    if visits > MAX_JPEG_VISITS:
        raise BadImage(
            f"the image's {scans} JPEG scans or more visit its pixels {visits} times in all; at most {MAX_JPEG_VISITS} "
            "are accepted: send it smaller, or baseline"
        )


def _webp_pixels(data: bytes) -> int:
    kind, body = data[12:16], data[20:30].ljust(10, b"\0")
    if kind == _EXTENDED:
        return (int.from_bytes(body[4:7], "little") + 1) * (int.from_bytes(body[7:10], "little") + 1)
    if kind == _LOSSY:
        return (int.from_bytes(body[6:8], "little") & 0x3FFF) * (int.from_bytes(body[8:10], "little") & 0x3FFF)
    if kind == _LOSSLESS:
        bits = int.from_bytes(body[1:5], "little")
        return ((bits & 0x3FFF) + 1) * ((bits >> 14 & 0x3FFF) + 1)
    return 0


def _check_webp(data: bytes) -> None:
    check_number(_webp_pixels(data), MAX_IMAGE_PIXELS, "pixels")
    end = min(len(data), int.from_bytes(data[4:8], "little") + _WEBP_HEADER_BYTES)  # libwebp reads no further
    at, frames = _WEBP_FIRST_CHUNK, 0
    for _ in range(MAX_WEBP_CHUNKS):
        if at >= end:
            return
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        frames += kind == _ANIMATION_FRAME
        if frames > 1:
            raise BadImage("the image is animated; send a single picture")
        if kind == _WEBP_EXIF:
            check_number(size, MAX_EXIF_BYTES, "bytes of EXIF")
        at += _WEBP_HEADER_BYTES + size + size % 2
    raise BadImage(f"the image has more than {MAX_WEBP_CHUNKS} WebP chunks; at most {MAX_WEBP_CHUNKS} are accepted")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """The checks of one file format."""

    signature: bytes
    check: Callable[[bytes], None]
    claimed_pixels: Callable[[bytes], int]


_FORMATS = (
    _Format(signature=_JPEG_SIGNATURE, check=_check_jpeg, claimed_pixels=_jpeg_pixels),
    _Format(signature=_PNG_SIGNATURE, check=_check_png, claimed_pixels=_png_pixels),
    _Format(signature=_WEBP_SIGNATURE, check=_check_webp, claimed_pixels=_webp_pixels),
)
