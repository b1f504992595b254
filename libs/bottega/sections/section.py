"""A section: what one forward of a template put out, as one file.

The file has the tensors, float16, row-major, each at a multiple of 64 bytes, in the order in which an edit uses them,
and behind them 64 bytes that say whose they are: what two tenants have recorded never is one file, however equal.
Which tensors they are is written elsewhere, beside the file's digest: there is no header in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bottega.v1 import activations_pb2

SECTION_ALIGNMENT = 64
"""Bytes: the widest vector registers, and what a message aligns its tensors to."""

MAX_TENSORS = 4000
"""Of a section; a message has room for a few more. SDXL's has 70 of its transformer blocks, and some 100 of others."""

MAX_NAME_BYTES = 200
"""Of a tensor's name: as in a message."""

MAX_RANK = 4
"""Dimensions of a tensor."""

MAX_SECTION_BYTES = 1 << 30
"""Of a section: SDXL's has 210 MB at 1024x1024, four times as many at 2048x2048."""

OWNER_BYTES = 64
"""Behind the last tensor: the key of the template, and zeros."""

_ITEM_BYTES = 2
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionTensor:
    """A tensor of a section, float16. name: path of the module that put it out. Raises ValueError beyond a bound."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not (0 < len(self.name.encode()) <= MAX_NAME_BYTES and self.name.isprintable()):
            raise ValueError(f"the tensor of a section has a name of 1 to {MAX_NAME_BYTES} printable bytes")
        if not 1 <= len(self.shape) <= MAX_RANK or any(extent < 1 for extent in self.shape):
            raise ValueError(f"{self.name} of a section has 1 to {MAX_RANK} dimensions, each at least 1")
        if self.size_bytes > MAX_SECTION_BYTES:
            raise ValueError(f"{self.name} of a section has more than {MAX_SECTION_BYTES} bytes")

    @property
    def size_bytes(self) -> int:
        """Of all its elements."""
        return math.prod(self.shape) * _ITEM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionLayout:
    """Where the tensors lie in the file. offsets: first byte of each. size_bytes: of the file, its end included.

    Raises ValueError for none, too many, two of one name, or too many bytes.
    """

    tensors: tuple[SectionTensor, ...]
    offsets: tuple[int, ...] = field(init=False, compare=False)
    size_bytes: int = field(init=False, compare=False)
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
        """The layout of tensors given by name and shape, in the order of their use. Raises ValueError."""
        return cls(tensors=tuple(SectionTensor(name=name, shape=tuple(shape)) for name, shape in tensors))

    @classmethod
    def from_wire(cls, layout: activations_pb2.SectionLayout) -> SectionLayout:
        """What `to_wire` has made. Raises ValueError."""
        if len(layout.tensors) > MAX_TENSORS:
            raise ValueError(f"a section has 1 to {MAX_TENSORS} tensors, not {len(layout.tensors)}")
        return cls.of((tensor.name, tensor.shape) for tensor in layout.tensors)

    def to_wire(self) -> activations_pb2.SectionLayout:
        """As a TemplateAnswer carries it."""
        tensors = (activations_pb2.SectionTensor(name=each.name, shape=each.shape) for each in self.tensors)
        return activations_pb2.SectionLayout(tensors=tensors)

    def index(self, name: str) -> int | None:
        """The tensor's place in `tensors`; None where the section does not have it."""
        return self._places.get(name)

    def place(self, name: str) -> tuple[int, int]:
        """First byte and number of bytes of a tensor. Raises KeyError where the section does not have it."""
        index = self._places[name]
        return self.offsets[index], self.tensors[index].size_bytes

    @property
    def tensor_bytes(self) -> int:
        """Of all tensors, without what aligns them."""
        return sum(tensor.size_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnTensors:
    """What a template's edits have in common outside their masks, float32, row-major, both of one shape.

    shape: 1, channels, height, width. Raises ValueError where the bytes are not as many as it says.
    """

    shape: tuple[int, ...]
    image_latent: bytes | memoryview
    noise: bytes | memoryview

    def __post_init__(self) -> None:
        if len(self.shape) != MAX_RANK or self.shape[0] != 1 or any(extent < 1 for extent in self.shape):
            raise ValueError("image latent and noise of a template have the shape 1, channels, height, width")
        size_bytes = self.bytes_of(self.shape)
        if size_bytes > MAX_DRAWN_BYTES:
            raise ValueError(f"image latent and noise of a template have at most {MAX_DRAWN_BYTES} bytes each")
        if any(memoryview(each).nbytes != size_bytes for each in (self.image_latent, self.noise)):
            raise ValueError("image latent and noise of a template have other bytes than their shape says")

    @property
    def size_bytes(self) -> int:
        """Of both."""
        return 2 * self.bytes_of(self.shape)

    @staticmethod
    def bytes_of(shape: tuple[int, ...]) -> int:
        """Of one of them, of this shape."""
        return math.prod(shape) * 4


MAX_DRAWN_BYTES = 32 << 20
"""Of an image latent: 16 channels of 4096x4096 pixels have half of it."""


def owner(key: str) -> bytes:
    """The end of the file of a section whose template has this key, 64 hex digits. Raises ValueError."""
    said = bytes.fromhex(key)
    if len(said) != _KEY_BYTES:
        raise ValueError("the key of a template has 64 hex digits")
    return said.ljust(OWNER_BYTES, b"\0")


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
