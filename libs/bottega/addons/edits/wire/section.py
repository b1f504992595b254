"""Sections: the recorded outputs of one forward pass of a template, as one file.

The file has float16 tensors, row-major, each at a multiple of 64 bytes, in the order in which an edit uses them. They
are followed by 64 bytes that identify the template, so that recordings of two tenants are never the same file, even if
they are equal. The file has no header: its layout is stored beside its digest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bottega.v1 import activations_pb2

SECTION_ALIGNMENT = 64
"""Alignment of tensors in bytes: the widest vector registers, and the alignment in messages."""

MAX_TENSORS = 4000
"""Maximum number of tensors; a message can have a few more. SDXL has 70 transformer blocks and some 100 others."""

MAX_NAME_BYTES = 200
"""Maximum length of a tensor's name, the same as in a message."""

MAX_RANK = 4
"""Maximum number of dimensions of a tensor."""

MAX_SECTION_BYTES = 1 << 30
"""Maximum size of a section. SDXL has 210 MB at 1024x1024, and four times as much at 2048x2048."""

OWNER_BYTES = 64
"""Size of the owner at the end of the file: the key of the template, and zeros."""

_ITEM_BYTES = 2
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionTensor:
    """Name and shape of a float16 tensor in a section. Raises ValueError if a limit is exceeded."""

    name: str
    """Path of the module whose output the tensor is."""
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not (0 < len(self.name.encode()) <= MAX_NAME_BYTES and self.name.isprintable()):
            raise ValueError(f"the name of a section's tensor must have 1 to {MAX_NAME_BYTES} printable bytes")
        if not 1 <= len(self.shape) <= MAX_RANK or any(extent < 1 for extent in self.shape):
            raise ValueError(f"{self.name} of a section must have 1 to {MAX_RANK} dimensions, each at least 1")
        if self.size_bytes > MAX_SECTION_BYTES:
            raise ValueError(f"{self.name} of a section has more than {MAX_SECTION_BYTES} bytes")

    @property
    def size_bytes(self) -> int:
        """Size of all elements."""
        return math.prod(self.shape) * _ITEM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionLayout:
    """The tensors of a section and where they are in its file.

    Raises ValueError for no tensors, too many, two of one name, or too many bytes.
    """

    tensors: tuple[SectionTensor, ...]
    offsets: tuple[int, ...] = field(init=False, compare=False)
    """Offset of the first byte of each tensor."""
    size_bytes: int = field(init=False, compare=False)
    """Size of the file, including the owner at its end."""
    _places: dict[str, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.tensors) <= MAX_TENSORS:
            raise ValueError(f"a section has 1 to {MAX_TENSORS} tensors, not {len(self.tensors)}")
        places = {tensor.name: place for place, tensor in enumerate(self.tensors)}
        if len(places) < len(self.tensors):
            raise ValueError("two tensors of a section have the same name")
        offsets, end = [], 0
        for tensor in self.tensors:
            offsets.append(end)
            end += _aligned(tensor.size_bytes)
        if end + OWNER_BYTES > MAX_SECTION_BYTES:
            raise ValueError(f"a section of {end} bytes is over {MAX_SECTION_BYTES}")
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "size_bytes", end + OWNER_BYTES)
        object.__setattr__(self, "_places", places)

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Sequence[int]]]) -> SectionLayout:
        """Return the layout of tensors, given as name and shape in the order of their use. Raise ValueError."""
        return cls(tensors=tuple(SectionTensor(name=name, shape=tuple(shape)) for name, shape in tensors))

    @classmethod
    def from_wire(cls, layout: activations_pb2.SectionLayout) -> SectionLayout:
        """Convert a message to a layout. Raise ValueError if it is invalid."""
        if len(layout.tensors) > MAX_TENSORS:
            raise ValueError(f"a section has 1 to {MAX_TENSORS} tensors, not {len(layout.tensors)}")
        return cls.of((tensor.name, tensor.shape) for tensor in layout.tensors)

    def to_wire(self) -> activations_pb2.SectionLayout:
        """Convert the layout to a message."""
        tensors = (activations_pb2.SectionTensor(name=tensor.name, shape=tensor.shape) for tensor in self.tensors)
        return activations_pb2.SectionLayout(tensors=tensors)

    def index(self, name: str) -> int | None:
        """Return the index of a tensor in `tensors`; None if the section does not have it."""
        return self._places.get(name)

    def place(self, name: str) -> tuple[int, int]:
        """Return offset and size of a tensor in bytes. Raise KeyError if the section does not have it."""
        index = self._places[name]
        return self.offsets[index], self.tensors[index].size_bytes

    @property
    def tensor_bytes(self) -> int:
        """Size of all tensors, without padding."""
        return sum(tensor.size_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnTensors:
    """The image latent and noise that a template's edits share outside their masks, float32 and row-major.

    Raises ValueError if the bytes do not fit the shape.
    """

    shape: tuple[int, ...]
    """1, channels, height, width."""
    image_latent: bytes | memoryview
    noise: bytes | memoryview

    def __post_init__(self) -> None:
        if len(self.shape) != MAX_RANK or self.shape[0] != 1 or any(extent < 1 for extent in self.shape):
            raise ValueError("image latent and noise of a template must have the shape 1, channels, height, width")
        size_bytes = self.bytes_of(self.shape)
        if size_bytes > MAX_DRAWN_BYTES:
            raise ValueError(f"image latent and noise of a template have at most {MAX_DRAWN_BYTES} bytes each")
        if any(memoryview(data).nbytes != size_bytes for data in (self.image_latent, self.noise)):
            raise ValueError("the sizes of a template's image latent and noise do not match their shape")

    @property
    def size_bytes(self) -> int:
        """Size of image latent and noise together."""
        return 2 * self.bytes_of(self.shape)

    @staticmethod
    def bytes_of(shape: tuple[int, ...]) -> int:
        """Return the size of one tensor of this shape."""
        return math.prod(shape) * 4


MAX_DRAWN_BYTES = 32 << 20
"""Maximum size of an image latent. 16 channels of 4096x4096 pixels have half of it."""


def owner(key: str) -> bytes:
    """Return the owner for the end of a section's file, from a template key of 64 hex digits. Raise ValueError."""
    encoded = bytes.fromhex(key)
    if len(encoded) != _KEY_BYTES:
        raise ValueError("the key of a template must have 64 hex digits")
    return encoded.ljust(OWNER_BYTES, b"\0")


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
