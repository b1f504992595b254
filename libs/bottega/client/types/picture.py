"""A finished picture as the SDK hands it out."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bottega.client.files import write_whole
from bottega.errors import InternalError
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import ImageFormat
from bottega.v1.image_pb2 import Image

if TYPE_CHECKING:
    import PIL.Image

    from bottega.client.types.provenance import Provenance

Format = Literal["png", "jpeg", "webp"]

SUFFIXES: dict[str, Format] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
"""Formats by the file suffix that people give them."""

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
    """A finished picture, which a notebook displays.

    data: the encoded picture, in `format`.
    seed: draws this very picture again, alone, with the parameters of `provenance`; one of several that started from a
    cached latent also needs that as `cache_entry`. An edit needs its image and mask again; one that took a part from a
    recording (`provenance.mask.recording`) cannot be drawn again.
    index: its place in the job, from 0.
    digest: SHA-256 of `data`, hex; checked when it arrived.
    provenance: what really happened.
    """

    data: bytes = field(repr=False)
    format: Format
    seed: int
    width: int
    height: int
    index: int
    digest: str
    job_id: str
    provenance: Provenance = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the picture as it is, whole or not at all, and returns the path.

        Raises ValueError when the suffix names another format, and OSError as open() would.
        """
        target = Path(path)
        named = SUFFIXES.get(target.suffix.lower(), self.format)
        if named != self.format:
            raise ValueError(f"{target.name} is a name for {named}, the picture is {self.format}; use format={named!r}")
        write_whole(target, self.data)
        return target

    def pil(self) -> PIL.Image.Image:
        """The picture as a Pillow image, decoded."""
        import PIL.Image

        image = PIL.Image.open(io.BytesIO(self.data))
        image.load()
        return image

    def __bytes__(self) -> bytes:
        return self.data

    def _repr_mimebundle_(self, **_: object) -> dict[str, bytes]:
        return {f"image/{self.format}": self.data}


def format_of(number: ImageFormat.ValueType) -> Format:
    """The name of what the contract numbers. Raises InternalError for a format of a later version."""
    if number not in _NAMES:
        raise InternalError(f"the picture's format has the number {number}, which this version does not know")
    return _NAMES[number]


def picture_from(image: Image, data: bytes, *, job_id: str, provenance: Provenance) -> Picture:
    """The picture that the wire describes by `image` and carries as `data`."""
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
