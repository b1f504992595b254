"""Sealed files in memory: a section from a worker is copied into one, and other workers may map it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bottega.addons.edits.wire import DrawnTensors, SectionLayout
from bottega.addons.edits.wire.pieces import SectionPieces
from bottega.addons.edits.wire.section import owner
from bottega.storage import os_errors
from bottega.transport.memory import new_file, reserve, seal


class SectionFile:
    """The memory file of a section while its tensors arrive. Only one thread may use it at a time.

    `key` is that of the template. Raises StorageUnavailable if there is no memory or no descriptor.
    """

    def __init__(self, layout: SectionLayout, key: str) -> None:
        self._layout = layout
        self._pieces = SectionPieces(layout)
        end = owner(key)
        self._descriptor = memory_file([(layout.size_bytes - len(end), end)], layout.size_bytes)

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have arrived."""
        return self._pieces.done

    def write(self, tensor: int, start: int, data: memoryview) -> None:
        """Write the next bytes, which begin at `start` of `tensor` and may span several tensors.

        Raise ValueError if they do not follow the previous ones or exceed the section, and StorageUnavailable.
        """
        if self._pieces.done or self._pieces.first != (tensor, start):
            raise ValueError("a chunk of a section does not begin where the previous one ended")
        pieces = self._pieces.take(len(data))
        if sum(piece.size_bytes for piece in pieces) < len(data):
            raise ValueError("the size of a section does not match the shapes of its tensors")
        with os_errors.translated():
            for piece in pieces:
                place = self._layout.offsets[piece.tensor] + piece.start
                _write(self._descriptor, data[: piece.size_bytes], place)
                data = data[piece.size_bytes :]

    def seal(self) -> int:
        """Make the file immutable and return its descriptor, which the caller closes. Raise StorageUnavailable."""
        with os_errors.translated():
            seal(self._descriptor)
        return self._descriptor

    def close(self) -> None:
        """Discard an incomplete file."""
        os.close(self._descriptor)


def drawn_file(drawn: DrawnTensors, key: str) -> tuple[int, int]:
    """Write image latent and noise to a sealed memory file. Return its descriptor, for the caller to close, and size.

    Raise StorageUnavailable if there is no memory or no descriptor.
    """
    end, half = owner(key), drawn.size_bytes // 2
    parts = [(0, drawn.image_latent), (half, drawn.noise), (2 * half, end)]
    size_bytes = drawn.size_bytes + len(end)
    return _sealed(parts, size_bytes), size_bytes


def read_drawn(data: bytes, shape: tuple[int, ...]) -> DrawnTensors:
    """Parse the content of a file that `drawn_file` wrote. Raise ValueError if it does not match the shape."""
    view = memoryview(data)
    half = DrawnTensors.bytes_of(shape)
    return DrawnTensors(shape=shape, image_latent=view[:half], noise=view[half : 2 * half])


def _sealed(parts: Sequence[tuple[int, bytes | memoryview]], size_bytes: int) -> int:
    descriptor = memory_file(parts, size_bytes)
    try:
        with os_errors.translated():
            seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def memory_file(parts: Sequence[tuple[int, bytes | memoryview]], size_bytes: int) -> int:
    """Create a file in memory with these parts at their offsets; the rest is zeros. Raise StorageUnavailable."""
    with os_errors.translated():
        descriptor = new_file("section")
        try:
            reserve(descriptor, size_bytes)
            for place, part in parts:
                _write(descriptor, memoryview(part).cast("B"), place)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _write(descriptor: int, rest: memoryview, place: int) -> None:
    while rest:
        done = os.pwrite(descriptor, rest, place)
        rest, place = rest[done:], place + done
