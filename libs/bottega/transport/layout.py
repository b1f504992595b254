"""Layouts: the named tensors of a message, their places in a slot, and their encoding.

A layout is registered once for a link and reused for every message. Offsets are computed and never transmitted, so they
cannot be forged. An element type is a name and a number of bytes.

The first tensors of a message may be its header, which is read before the rest can be used. A header lies in host
memory, even if the rest moves between devices.
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

# Tensors begin at multiples of this: the widest vector registers and a cache line.
ALIGNMENT_BYTES = 64
# A LoRA of SDXL has about 2,200 tensors with its alphas.
MAX_TENSORS = 4096
MAX_RANK = 8
MAX_NAME_BYTES = 200
# Far above any device's memory, far below an overflow of 64-bit sums.
MAX_LAYOUT_BYTES = 1 << 40
# Maximum size of a description. One with MAX_TENSORS tensors and names of common lengths has a quarter of this.
MAX_ENCODED_BYTES = 1 << 20

# A description is little-endian: the numbers of tensors and of headers; then for each tensor the length of its name,
# its element type and its rank; its name; its extents.
_COUNTS = struct.Struct("<HH")
_TENSOR = struct.Struct("<BBB")
_EXTENT_BYTES = 8


class DType(IntEnum):
    """Element types, with the numbers of bottega.v1.DataType."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    UINT8 = 4
    INT64 = 5

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self]


_ITEM_BYTES = MappingProxyType({DType.FLOAT32: 4, DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.UINT8: 1, DType.INT64: 8})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor of a layout, row-major and contiguous. Raises ValueError if a field is out of bounds."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    """Dimensions, outermost first, each at least 1; () is a single element."""

    def __post_init__(self) -> None:
        if not (0 < len(self.name.encode()) <= MAX_NAME_BYTES and self.name.isprintable()):
            raise ValueError(f"a tensor's name has 1 to {MAX_NAME_BYTES} printable bytes, not {self.name[:80]!r}")
        if len(self.shape) > MAX_RANK:
            raise ValueError(f"tensor {self.name} has {len(self.shape)} dimensions; at most {MAX_RANK} can be sent")
        if any(extent < 1 for extent in self.shape):
            raise ValueError(f"tensor {self.name} has an extent below 1: {self.shape}")
        if self.size_bytes > MAX_LAYOUT_BYTES:
            raise ValueError(f"tensor {self.name} has {self.size_bytes} bytes; at most {MAX_LAYOUT_BYTES} can be sent")

    @property
    def size_bytes(self) -> int:
        """Number of bytes of all elements."""
        return math.prod(self.shape) * self.dtype.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The tensors of a message, in the order in which they are sent: those that are needed first come first.

    Raises ValueError if there is no tensor, too many, two with the same name, or fewer tensors than headers.
    """

    specs: tuple[TensorSpec, ...]
    headers: int = 0
    """Number of tensors, counted from the first, that are the message's header."""
    header_bytes: int = field(init=False)
    """Bytes of the header in the slot."""
    offsets: tuple[int, ...] = field(init=False)
    """First byte of each tensor in the slot."""
    ends: tuple[int, ...] = field(init=False)
    """The first byte after each tensor."""
    size_bytes: int = field(init=False)
    """Size of the whole message, a multiple of 64."""
    digest: bytes = field(init=False)
    """SHA-256 of the encoding; equal digests mean equal layouts."""

    def __post_init__(self) -> None:
        if not 0 < len(self.specs) <= MAX_TENSORS:
            raise ValueError(f"a layout has 1 to {MAX_TENSORS} tensors, not {len(self.specs)}")
        if len({spec.name for spec in self.specs}) < len(self.specs):
            raise ValueError("two tensors of a layout have the same name")
        if not 0 <= self.headers <= len(self.specs):
            raise ValueError(f"a layout of {len(self.specs)} tensors has {self.headers} headers")
        offsets, ends, end = [], [], 0
        for spec in self.specs:
            offsets.append(end)
            ends.append(end + spec.size_bytes)
            end += -(-spec.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if end > MAX_LAYOUT_BYTES:
            raise ValueError(f"a layout has {end} bytes; at most {MAX_LAYOUT_BYTES} can be sent")
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "ends", tuple(ends))
        object.__setattr__(self, "size_bytes", end)
        object.__setattr__(self, "header_bytes", [*offsets, end][self.headers])
        encoded = self.encode()
        if len(encoded) > MAX_ENCODED_BYTES:
            raise ValueError(f"a layout's description of {len(encoded)} bytes is over {MAX_ENCODED_BYTES}")
        object.__setattr__(self, "digest", hashlib.sha256(encoded).digest())

    @classmethod
    def of(cls, *specs: TensorSpec, headers: int = 0) -> Layout:
        """Return the layout of these tensors, in this order."""
        return cls(specs=specs, headers=headers)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first byte of tensor `start` in the slot, and the first byte after tensor `stop` - 1."""
        return self.offsets[start], self.ends[stop - 1]

    def views(self, slot: memoryview) -> tuple[memoryview, ...]:
        """Return each tensor's bytes in a slot."""
        return tuple(slot[offset:end] for offset, end in zip(self.offsets, self.ends, strict=True))

    def encode(self) -> bytes:
        """Serialize the layout, to register it with a peer."""
        parts = [_COUNTS.pack(len(self.specs), self.headers)]
        for spec in self.specs:
            name, rank = spec.name.encode(), len(spec.shape)
            parts += (_TENSOR.pack(len(name), spec.dtype, rank), name, struct.pack(f"<{rank}Q", *spec.shape))
        return b"".join(parts)

    @classmethod
    def decode(cls, encoded: bytes) -> Layout:
        """Parse a serialized layout. Raises ValueError, which names the broken rule.

        Args:
            encoded: A copy, not memory that the peer may still change.
        """
        if len(encoded) > MAX_ENCODED_BYTES:
            raise ValueError(f"a layout's description has {len(encoded)} bytes; at most {MAX_ENCODED_BYTES} are read")
        stream = io.BytesIO(encoded)
        count, headers = _COUNTS.unpack(_read(stream, _COUNTS.size))
        if count > MAX_TENSORS:
            raise ValueError(f"a layout's description has {count} tensors; at most {MAX_TENSORS} can be sent")
        specs = tuple(_read_spec(stream) for _ in range(count))
        if stream.read(1):
            raise ValueError("a layout's description has bytes after its end")
        return cls(specs=specs, headers=headers)


_KNOWN = frozenset(int(dtype) for dtype in DType)


def _read_spec(stream: io.BytesIO) -> TensorSpec:
    name_bytes, dtype, rank = _TENSOR.unpack(_read(stream, _TENSOR.size))
    if rank > MAX_RANK:
        raise ValueError(f"a layout's description has {rank} dimensions; at most {MAX_RANK} can be sent")
    name = _read(stream, name_bytes).decode()  # invalid UTF-8 is a ValueError too
    if dtype not in _KNOWN:
        raise ValueError(f"tensor {name[:80]!r} has the unknown element type {dtype}")
    shape = struct.unpack(f"<{rank}Q", _read(stream, rank * _EXTENT_BYTES))
    return TensorSpec(name=name, dtype=DType(dtype), shape=shape)


def _read(stream: io.BytesIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise ValueError("a layout's description ends too early")
    return data
