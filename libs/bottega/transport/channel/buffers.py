"""What messages consist of: parts, one for each tensor, in memory of the host or of a device, and a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from bottega.errors import TooLarge
from bottega.transport.layout import Layout
from bottega.transport.memory.sealed_file import SealedFile


class Buffer(Protocol):
    """Flat or shaped memory without gaps: bytes, bytearray, memoryview, mmap, a numpy array."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class DeviceBuffer(Protocol):
    """Flat bytes in memory of a device. What it is, those know who use devices (bottega.device_links)."""

    @property
    def nbytes(self) -> int: ...

    def to_host(self) -> memoryview:
        """A copy in memory of the host, when what is enqueued to write the bytes is done. It waits for that."""
        ...


Part: TypeAlias = memoryview | DeviceBuffer
"""One tensor's bytes in a message, where they lie. A header's are a memoryview, whatever carries the link."""

SentBuffer: TypeAlias = Buffer | DeviceBuffer
"""What a tensor of a whole message is sent from."""


def checked(layout: Layout, buffers: Sequence[SentBuffer]) -> list[Part]:
    """Flat bytes of every buffer; a header's are brought to the host. Raises ValueError when they do not fit the
    layout."""
    if len(buffers) != len(layout.specs):
        raise ValueError(f"{len(buffers)} buffers for a layout of {len(layout.specs)} tensors")
    parts = [_flat(buffer) for buffer in buffers]
    for spec, part in zip(layout.specs, parts, strict=True):
        if part.nbytes != spec.size_bytes:
            raise ValueError(f"tensor {spec.name} has {spec.size_bytes} bytes, its buffer {part.nbytes}")
    headers = [part if isinstance(part, memoryview) else part.to_host() for part in parts[: layout.headers]]
    return [*headers, *parts[layout.headers :]]


def on_host(parts: Sequence[Part]) -> list[memoryview]:
    """All of them in memory of the host: those of a device are copied."""
    return [part if isinstance(part, memoryview) else part.to_host() for part in parts]


def in_host_memory(part: Part) -> memoryview:
    """A part that must be there already. Raises ValueError where it is not: nothing is parsed in memory of a device."""
    if not isinstance(part, memoryview):
        raise ValueError("what should be a message's header lies in memory of a device")
    return part


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


def _flat(buffer: SentBuffer) -> Part:
    if isinstance(buffer, (bytes, bytearray, memoryview)):
        return memoryview(buffer).cast("B")
    if hasattr(buffer, "to_host"):
        return buffer  # type: ignore[return-value] # a protocol that is checked at run time is slow
    return memoryview(buffer).cast("B")
