"""Limits that an image must meet before it is decoded.

The formats are those whose decoders read untrusted files every day. Limits on bytes and pixels do not bound the time of
decoding: the scans of a JPEG may visit its pixels any number of times, and a PNG may have any number of texts to
inflate. So there is a limit on the number of everything that costs a decoder time.
"""

from __future__ import annotations

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


def check_number(found: int, most: int, what: str) -> None:
    """Raise BadImage if an image has more of something than is accepted.

    Args:
        what: Noun in the plural for the error, such as "pixels".
    """
    if found > most:
        raise BadImage(f"the image has {found} {what}; at most {most} are accepted")


def check_pixels(width: int, height: int) -> None:
    """Raise BadImage if an image has more pixels than are accepted."""
    if width * height > MAX_IMAGE_PIXELS:
        raise BadImage(f"the image is {width}x{height}; at most {MAX_IMAGE_PIXELS} pixels are accepted")
