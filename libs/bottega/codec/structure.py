"""What a file is made of, looked at before a decoder sees it: is it one that a decoder is done with soon?

It goes once over the file at most, and over its pixels never. What is broken in another way is left to the decoder.
"""

from __future__ import annotations

from typing import Protocol

from bottega.codec import jpeg_structure, png_structure, webp_structure
from bottega.errors import BadImage


class _Kind(Protocol):
    """What the module of a kind of file has."""

    SIGNATURE: bytes

    def check(self, data: bytes) -> None: ...

    def claimed_pixels(self, data: bytes) -> int: ...


_KINDS: tuple[_Kind, ...] = (jpeg_structure, png_structure, webp_structure)


def check(data: bytes) -> None:
    """Raises BadImage for a file with more parts than images have; says what was found and what is taken."""
    for kind in _KINDS:
        if data.startswith(kind.SIGNATURE):
            kind.check(data)


def claimed_pixels(data: bytes) -> int:
    """Return how many pixels decoding visits, by the header alone; 0 for a file that `check` refuses, or that is none.

    Takes some milliseconds at most. A progressive JPEG counts four times: its pixels are visited by every scan.
    """
    for kind in _KINDS:
        if data.startswith(kind.SIGNATURE):
            try:
                return kind.claimed_pixels(data)
            except BadImage:
                return 0
    return 0
