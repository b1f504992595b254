"""The parts of messages: one for each tensor, in host or device memory, and an optional file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from bottega.errors import TooLarge
from bottega.transport.layout import Layout
from bottega.transport.memory.sealed_file import SealedFile


class Buffer(Protocol):
    """Contiguous memory, flat or shaped: bytes, bytearray, memoryview, mmap, a numpy array."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class DeviceBuffer(Protocol):
    """Flat bytes in device memory. Its implementation is in bottega.device_links."""

    @property
    def nbytes(self) -> int: ...

    def to_host(self) -> memoryview:
        """Return a copy in host memory, after waiting for the enqueued work that writes the bytes."""
        ...


Part: TypeAlias = memoryview | DeviceBuffer
"""The bytes of one tensor of a message, where they lie. Tensors of a header are always a memoryview."""

SentBuffer: TypeAlias = Buffer | DeviceBuffer
"""A buffer from which a tensor of a whole message is sent."""


def checked(layout: Layout, buffers: Sequence[SentBuffer]) -> list[Part]:
    """Return the flat bytes of every buffer, with a header's copied to the host.

    Raises ValueError if the buffers do not fit the layout.
    """
    if len(buffers) != len(layout.specs):
        raise ValueError(f"{len(buffers)} buffers for a layout of {len(layout.specs)} tensors")
    parts = [_flat(buffer) for buffer in buffers]
    for spec, part in zip(layout.specs, parts, strict=True):
        if part.nbytes != spec.size_bytes:
            raise ValueError(f"tensor {spec.name} has {spec.size_bytes} bytes, its buffer {part.nbytes}")
    headers = [part if isinstance(part, memoryview) else part.to_host() for part in parts[: layout.headers]]
    return [*headers, *parts[layout.headers :]]


def on_host(parts: Sequence[Part]) -> list[memoryview]:
    """Return all parts in host memory; those in device memory are copied."""
    return [part if isinstance(part, memoryview) else part.to_host() for part in parts]


def in_host_memory(part: Part) -> memoryview:
    """Return a part that must be in host memory already.

    Raises ValueError if it is not: nothing is parsed in device memory.
    """
    if not isinstance(part, memoryview):
        raise ValueError("what should be a message's header lies in memory of a device")
    return part


def check_file(file: SealedFile, *, passes: bool, most_bytes: int) -> None:
    """Raise ValueError if the link passes no files or the file is empty, and TooLarge if it exceeds `most_bytes`."""
    if not passes:
        raise ValueError("this link passes no files: check passes_files first")
    if file.size_bytes < 1:
        raise ValueError("an empty file needs no passing")
    if file.size_bytes > most_bytes:
        raise TooLarge(
            f"a file of {file.size_bytes} bytes is more than the {most_bytes} that the peer receives",
            metadata={"limit": "slot_bytes"},
        )


def _flat(buffer: SentBuffer) -> Part:
    if isinstance(buffer, (bytes, bytearray, memoryview)):
        return memoryview(buffer).cast("B")
    if hasattr(buffer, "to_host"):
        return buffer  # type: ignore[return-value] # checking a protocol at run time is slow
    return memoryview(buffer).cast("B")
