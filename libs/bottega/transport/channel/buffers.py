"""What a whole message is sent from: buffers of the caller's own, one for each tensor of its layout, and a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bottega.errors import TooLarge
from bottega.transport.layout import Layout
from bottega.transport.memory.sealed_file import SealedFile


class Buffer(Protocol):
    """Flat or shaped memory without gaps: bytes, bytearray, memoryview, mmap, a numpy array."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


def checked(layout: Layout, buffers: Sequence[Buffer]) -> list[memoryview]:
    """Flat bytes of every buffer. Raises ValueError when they do not fit the layout."""
    if len(buffers) != len(layout.specs):
        raise ValueError(f"{len(buffers)} buffers for a layout of {len(layout.specs)} tensors")
    pieces = [memoryview(buffer).cast("B") for buffer in buffers]
    for spec, piece in zip(layout.specs, pieces, strict=True):
        if len(piece) != spec.size_bytes:
            raise ValueError(f"tensor {spec.name} has {spec.size_bytes} bytes, its buffer {len(piece)}")
    return pieces


def check_file(file: SealedFile, *, passes: bool, most_bytes: int) -> None:
    """passes: whether the link does. Raises ValueError where it does not, or there is nothing in the file; TooLarge."""
    if not passes:
        raise ValueError("this link passes no files: check passes_files first")
    if file.size_bytes < 1:
        raise ValueError("an empty file needs no passing")
    if file.size_bytes > most_bytes:
        raise TooLarge(
            f"a file of {file.size_bytes} bytes is more than the {most_bytes} that the peer receives",
            metadata={"limit": "slot_bytes"},
        )
