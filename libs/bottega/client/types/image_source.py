"""Input images as callers give them: encoded bytes, a path, a Pillow image or a picture of ours; how they travel."""

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
    """What the SDK uses of a Pillow image, so that it need not import Pillow."""

    def save(self, fp: Any, format: str | None = None) -> None: ...


ImageSource = bytes | str | os.PathLike[str] | PillowImage | Picture

# Pillow's own: an image whose mode is none of PNG's, or that has been closed.
_NO_IMAGE = (AttributeError, OSError, TypeError, ValueError)


def set_image(
    message: GenerationSpec | ControlNet, image: object, *, name: str = "image", path: str | None = None
) -> Iterator[Violation]:
    """Puts an image into a message, or says why that cannot be.

    name: of the message's field. path: what its caller calls it; absent is the field's name.
    """
    try:
        setattr(message, name, _encoded(image))
    except _NO_IMAGE as error:
        yield Violation(field=path or name, description=str(error))


def size_of(image: bytes | Path) -> ImageSize:
    """In pixels, turned as its EXIF says, as the services see it.

    Raises BadImage for what the services would not take either, and OSError.
    """
    from bottega.codec.images import inspect

    return inspect(image if isinstance(image, bytes) else image.read_bytes())


def _encoded(image: Any) -> bytes:
    """As bytes that travel: what is encoded already stays as it is. Raises what is in _NO_IMAGE."""
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
