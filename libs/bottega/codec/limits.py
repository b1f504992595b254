"""What an image may be before anything of it is decoded.

Bytes and pixels bound memory and time of one call; the formats are those whose decoders are fed with
strangers' files every day. This module knows no decoder.
"""

from __future__ import annotations

# A PNG of a photograph at 3 megapixels; a message of 24 MiB carries one with a mask and a control image.
MAX_IMAGE_BYTES = 8 * 2**20
# Four times the pixels of the largest picture that the suite draws by default.
MAX_IMAGE_PIXELS = 16 * 2**20
# By Pillow's names.
FORMATS = ("PNG", "JPEG", "WEBP")
FORMATS_FOR_PEOPLE = "PNG, JPEG or WebP"

# Address space of one codec process: the interpreter (about .2 GiB), the largest image encoded, decoded
# with four channels and turned, and its frame, twice.
ADDRESS_SPACE_BYTES = 1 * 2**30
# CPU seconds of one call; the largest lossless image takes under 3.
CPU_S = 15
