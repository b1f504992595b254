"""Pictures that have been drawn."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bottega.errors import InternalError
from bottega.state_folder import write_whole
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import ImageFormat
from bottega.v1.image_pb2 import Image

if TYPE_CHECKING:
    import PIL.Image

    from bottega.client.types.provenance import Provenance

Format = Literal["png", "jpeg", "webp"]

SUFFIXES: dict[str, Format] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
"""Formats by file suffix."""

FORMATS: dict[Format, ImageFormat.ValueType] = {
    "png": generation_pb2.IMAGE_FORMAT_PNG,
    "jpeg": generation_pb2.IMAGE_FORMAT_JPEG,
    "webp": generation_pb2.IMAGE_FORMAT_WEBP,
}
_NAMES: dict[ImageFormat.ValueType, Format] = {
    generation_pb2.IMAGE_FORMAT_UNSPECIFIED: "png",
    **{number: name for name, number in FORMATS.items()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A finished picture. Notebooks display it."""

    data: bytes = field(repr=False)
    """The encoded picture."""
    format: Format
    seed: int
    """Seed that draws this picture again, alone, with the parameters of `provenance`.

    If one of several pictures started from a cached latent, that latent is also needed, as `cache_entry`. An edit needs
    its image and mask again. An edit that used a recording (`provenance.mask.recording`) cannot be drawn again."""
    width: int
    height: int
    index: int
    """Index of the picture in its job, from 0."""
    digest: str
    """SHA-256 of `data`, hex, which was verified when the picture arrived."""
    job_id: str
    provenance: Provenance = field(repr=False)
    """How the picture was really drawn."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the encoded picture to a file, atomically, and return the path.

        Raises:
            ValueError: The suffix names another format.
            OSError: The file cannot be written.
        """
        target = Path(path)
        named = SUFFIXES.get(target.suffix.lower(), self.format)
        if named != self.format:
            raise ValueError(
                f"{target.name} is the name of a {named} file, the picture is {self.format}; use format={named!r}"
            )
        write_whole(target, self.data)
        return target

    def pil(self) -> PIL.Image.Image:
        """Return the decoded picture as a Pillow image."""
        import PIL.Image

        image = PIL.Image.open(io.BytesIO(self.data))
        image.load()
        return image

    def __bytes__(self) -> bytes:
        return self.data

    def _repr_mimebundle_(self, **_: object) -> dict[str, bytes]:
        return {f"image/{self.format}": self.data}


def format_of(number: ImageFormat.ValueType) -> Format:
    """Convert the message's enum value to a format. Raise InternalError for a format of a later version."""
    if number not in _NAMES:
        raise InternalError(f"the picture's format has the number {number}, which this version does not know")
    return _NAMES[number]


def picture_from(image: Image, data: bytes, *, job_id: str, provenance: Provenance) -> Picture:
    """Return the Picture with the encoded bytes `data` and the properties in the message `image`."""
    return Picture(
        data=data,
        format=format_of(image.format),
        seed=image.seed,
        width=image.width,
        height=image.height,
        index=image.index,
        digest=image.digest,
        job_id=job_id,
        provenance=provenance,
    )
