"""What an image may be before anything of it is decoded.

Bytes and pixels bound memory and time of one call; the formats are those whose decoders are fed with
untrusted files every day. Bytes and pixels alone do not bound the time: a JPEG may have its pixels visited by any
number of scans, and a PNG its text inflated any number of times. So everything that a decoder does once for each
of something has a bound on how many there may be.
"""

from __future__ import annotations

from bottega.errors import BadImage

# A PNG of a photograph at 3 megapixels; a message of 24 MiB carries one with a mask and a control image.
MAX_IMAGE_BYTES = 8 * 2**20
# Four times the pixels of the largest picture that the suite draws by default.
MAX_IMAGE_PIXELS = 16 * 2**20
# WebP's own. Resizing an image of 16 million by 1 pixels took 4 s and .9 GiB.
MAX_IMAGE_SIDE = 16_384
# By Pillow's names.
FORMATS = ("PNG", "JPEG", "WEBP")
FORMATS_FOR_PEOPLE = "PNG, JPEG or WebP"

# libjpeg's progressive encoder writes 10 scans, or 18 for four components; mozjpeg tries 64 and keeps some of them.
# One scan of 16 megapixels costs up to 13 ms, however few bytes it has.
MAX_JPEG_SCANS = 100
# Pixels times components, summed over all scans. libjpeg's 10 scans visit a component 14 times, 2**28 for the largest
# image; this is twice that, and costs .4 s at most.
MAX_JPEG_VISITS = 2**29
# Of everything but pixels and scans: 128 carry the longest colour profile, and a scan brings a few tables.
MAX_JPEG_SEGMENTS = 1024
# Between segments, before the pixels: padding, and what broken cameras leave there. Pillow looks at each by itself.
MAX_JPEG_STRAY_BYTES = 64 * 2**10
# libpng writes one for each 8 KiB; this is one for each 512 bytes.
MAX_PNG_CHUNKS = 16 * 2**10
# Each may inflate to 1 MiB (Pillow's bound), which takes about 2 ms. Editors write some ten.
MAX_PNG_TEXTS = 128
# A WebP of one picture has at most eight kinds of chunks, and unknown ones.
MAX_WEBP_CHUNKS = 256
# Cameras write less than 64 KiB, which is what a JPEG has room for in one segment.
MAX_EXIF_BYTES = 2**20

# Address space of one codec process: the interpreter (about .2 GiB), the largest image encoded, decoded
# with four channels and turned, and its frame, twice.
ADDRESS_SPACE_BYTES = 1 * 2**30
# CPU seconds of decoding and resizing one image. The worst that passes the bounds above took 1.1 s on two shared
# x86-64 cores (an interlaced PNG of 16 megapixels with 16 bits a channel); the rest is for slower machines.
DECODE_CPU_S = 5
# Of both images of an edit, the mask made grey and both resized: 3.4 s of 16 megapixels each beside other work.
DECODE_EDIT_CPU_S = 10
# CPU seconds of encoding one of our own pictures: 16 megapixels of lossless WebP take 16. Its caller's deadline ends
# what takes too long for it; this holds without a caller too.
ENCODE_CPU_S = 60
# Above it an image counts as large, and may be made to wait where others need not. The largest picture that the suite
# draws by default.
LARGE_PIXELS = 4 * 2**20


def check_number(found: int, most: int, what: str) -> None:
    """Raises BadImage for an image with more of something than is taken. what: as people call it."""
    if found > most:
        raise BadImage(f"the image has {found} {what}; at most {most} are taken")


def check_pixels(width: int, height: int) -> None:
    """Raises BadImage for more pixels than are taken."""
    if width * height > MAX_IMAGE_PIXELS:
        raise BadImage(f"the image is {width}x{height}; at most {MAX_IMAGE_PIXELS} pixels are taken")
