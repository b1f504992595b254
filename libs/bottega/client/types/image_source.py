"""Input images as callers give them: encoded bytes, a path, a Pillow image or a Picture; and their encoding."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bottega.client.types.messages import UNSENDABLE, describe
from bottega.client.types.picture import Picture
from bottega.errors import Violation
from bottega.v1.generation_pb2 import ControlNet, GenerationSpec

if TYPE_CHECKING:
    from bottega.codec import ImageSize


class PillowImage(Protocol):
    """The interface of a Pillow image, so that the SDK need not import Pillow."""

    def save(self, fp: Any, format: str | None = None) -> None: ...


ImageSource = bytes | str | os.PathLike[str] | PillowImage | Picture

# Errors of Pillow for an image whose mode PNG does not have, or that has been closed, and of files.
_NO_IMAGE = (AttributeError, OSError, TypeError, ValueError)


def set_image(
    message: GenerationSpec | ControlNet, image: object, *, name: str = "image", path: str | None = None
) -> Iterator[Violation]:
    """Set an image in a message, or yield why that is impossible.

    Args:
        name: The message's field.
        path: The name that the caller knows the field by; None for `name`.
    """
    try:
        setattr(message, name, _encoded(image))
    except _NO_IMAGE as error:
        yield Violation(field=path or name, description=str(error))


def size_of(image: bytes | Path) -> ImageSize:
    """Return the size of an image in pixels, rotated as its EXIF says, as the services see it.

    Raises:
        BadImage: The services would not take the image.
        OSError: The file cannot be read.
    """
    from bottega.codec.images import inspect

    return inspect(image if isinstance(image, bytes) else image.read_bytes())


def _encoded(image: Any) -> bytes:
    """Return an image as encoded bytes. Raise one of _NO_IMAGE if that is impossible."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, Picture):
        return image.data
    if isinstance(image, str | os.PathLike):
        return _read(image)
    if not hasattr(image, "save"):
        raise TypeError(f"must be bytes, a path, a Pillow image or a Picture; got {type(image).__name__}")
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}") from None
    except UNSENDABLE:
        raise ValueError(f"{describe(path)} cannot be the path of a file") from None
