"""Input images in requests: in base64, also as a data URL, or as a URL that the service fetches."""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema

_DATA_URL = re.compile(r"data:[a-z0-9/+.-]*;base64,", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """The URL of an input image, which the service fetches if an operator allows its host."""

    url: str


def image_in(value: object) -> bytes | RemoteImage:
    """Return the image that a text is, in base64 or as a URL. Raise ValueError for anything else."""
    if isinstance(value, str) and value[:8].lower().startswith(("http://", "https://")):
        return RemoteImage(value)
    try:
        if not isinstance(value, str):
            raise ValueError
        return binascii.a2b_base64(value[_end_of_head(value) :], strict_mode=True)
    except (binascii.Error, ValueError):  # ValueError: not ASCII
        raise ValueError("must be the bytes of an image in base64, or its URL") from None


def _end_of_head(value: str) -> int:
    head = _DATA_URL.match(value[:64])
    return head.end() if head else 0


InputImage = Annotated[
    bytes | RemoteImage,
    PlainValidator(image_in),
    WithJsonSchema({"anyOf": [{"type": "string", "contentEncoding": "base64"}, {"type": "string", "format": "uri"}]}),
]
"""An image, which JSON has in base64, also as a data URL, or as a URL."""


def encoded(image: bytes | RemoteImage | None) -> bytes | None:
    """Return the bytes of an image, which has been fetched if it was a URL."""
    assert not isinstance(image, RemoteImage)
    return image
