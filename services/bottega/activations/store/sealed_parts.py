"""What comes from a worker, on its way to the disk: copied once, into sealed memory that other workers can be given."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bottega.sections import DrawnTensors, SectionLayout
from bottega.sections.pieces import SectionPieces
from bottega.sections.section import owner
from bottega.storage import os_errors
from bottega.transport.memory.sealed_file import new_file, reserve, seal


class SectionFile:
    """The file of a section while its tensors come. key: of its template.

    One thread at a time calls it. Raises StorageUnavailable where there is no memory, or no descriptor.
    """

    def __init__(self, layout: SectionLayout, key: str) -> None:
        self._layout = layout
        self._pieces = SectionPieces(layout)
        end = owner(key)
        self._descriptor = _new([(layout.size_bytes - len(end), end)], layout.size_bytes)

    @property
    def is_whole(self) -> bool:
        """Whether all has come."""
        return self._pieces.done

    def write(self, tensor: int, start: int, data: memoryview) -> None:
        """The next bytes, of as many tensors as they are. tensor, start: where they begin.

        Raises ValueError where they begin elsewhere than what came has ended, or are more than the section has;
        StorageUnavailable.
        """
        if self._pieces.done or self._pieces.first != (tensor, start):
            raise ValueError("a chunk of a section does not begin where the one before it has ended")
        pieces = self._pieces.take(len(data))
        if sum(piece.size_bytes for piece in pieces) < len(data):
            raise ValueError("a section has other bytes than its tensors' shapes say")
        with os_errors.translated():
            for piece in pieces:
                place = self._layout.offsets[piece.tensor] + piece.start
                _write(self._descriptor, data[: piece.size_bytes], place)
                data = data[piece.size_bytes :]

    def seal(self) -> int:
        """Its descriptor, which the caller closes; from now on nobody can change it. Raises StorageUnavailable."""
        with os_errors.translated():
            seal(self._descriptor)
        return self._descriptor

    def close(self) -> None:
        """It will not be whole."""
        os.close(self._descriptor)


def drawn_file(drawn: DrawnTensors, key: str) -> tuple[int, int]:
    """The file of what a template was drawn with; its descriptor, which the caller closes, and its bytes.

    Raises StorageUnavailable where there is no memory, or no descriptor.
    """
    end, half = owner(key), drawn.size_bytes // 2
    parts = [(0, drawn.image_latent), (half, drawn.noise), (2 * half, end)]
    size_bytes = drawn.size_bytes + len(end)
    return _sealed(parts, size_bytes), size_bytes


def read_drawn(data: bytes, shape: tuple[int, ...]) -> DrawnTensors:
    """What `drawn_file` was given, of the bytes of its file. Raises ValueError."""
    view = memoryview(data)
    half = DrawnTensors.bytes_of(shape)
    return DrawnTensors(shape=shape, image_latent=view[:half], noise=view[half : 2 * half])


def _sealed(parts: Sequence[tuple[int, bytes | memoryview]], size_bytes: int) -> int:
    descriptor = _new(parts, size_bytes)
    try:
        with os_errors.translated():
            seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _new(parts: Sequence[tuple[int, bytes | memoryview]], size_bytes: int) -> int:
    """A file in memory that has these parts; the rest of it is zeros."""
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
