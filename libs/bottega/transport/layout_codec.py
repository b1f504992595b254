"""A layout's description as bytes: per tensor a name, the number of its element type, and its extents, little-endian.

It checks the form (lengths and counts); what the values mean, Layout checks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

# A layout with as many tensors as there may be, and names of common lengths, has a quarter of this.
MAX_ENCODED_BYTES = 1 << 20

_COUNT = struct.Struct("<I")
# Bytes of the name, element type, dimensions.
_TENSOR = struct.Struct("<BBB")
_EXTENT_BYTES = 8

Fields = tuple[str, int, tuple[int, ...]]


def encode_fields(tensors: Sequence[Fields]) -> bytes:
    """Name, element type and extents of every tensor, as bytes."""
    parts = [_COUNT.pack(len(tensors))]
    for name, dtype, shape in tensors:
        encoded = name.encode()
        parts.append(_TENSOR.pack(len(encoded), dtype, len(shape)))
        parts.append(encoded)
        parts.append(struct.pack(f"<{len(shape)}Q", *shape))
    return b"".join(parts)


def decode_fields(encoded: bytes, *, max_tensors: int, max_rank: int) -> Iterator[Fields]:
    """What `encode_fields` was given. Raises ValueError where the bytes are no such thing."""
    if len(encoded) > MAX_ENCODED_BYTES:
        raise ValueError(f"a layout's description has {len(encoded)} bytes; at most {MAX_ENCODED_BYTES} are read")
    cursor = _Cursor(encoded)
    (count,) = _COUNT.unpack(cursor.take(_COUNT.size))
    if count > max_tensors:
        raise ValueError(f"a layout's description speaks of {count} tensors; at most {max_tensors} can be sent")
    for _ in range(count):
        name_bytes, dtype, rank = _TENSOR.unpack(cursor.take(_TENSOR.size))
        if rank > max_rank:
            raise ValueError(f"a layout's description speaks of {rank} dimensions; at most {max_rank} can be sent")
        name = cursor.take(name_bytes).decode()  # what is no UTF-8 is a ValueError too
        yield name, dtype, struct.unpack(f"<{rank}Q", cursor.take(rank * _EXTENT_BYTES))
    cursor.end()


class _Cursor:
    """Takes bytes from the front; there are never fewer than were asked for."""

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded
        self._at = 0

    def take(self, count: int) -> bytes:
        taken = self._encoded[self._at : self._at + count]
        if len(taken) < count:
            raise ValueError("a layout's description ends too early")
        self._at += count
        return taken

    def end(self) -> None:
        if self._at != len(self._encoded):
            raise ValueError("a layout's description has bytes behind its end")
