"""What comes from a worker, on its way to the disk: copied once, into sealed memory that other workers can be given."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bottega.sections import DrawnTensors, SectionLayout
from bottega.sections.section import owner
from bottega.storage import os_errors
from bottega.transport.memory.sealed_file import new_file, reserve, seal


def section_file(layout: SectionLayout, views: Sequence[bytes | memoryview], key: str) -> int:
    """The file of a section; its descriptor, which the caller closes. views: its tensors' elements, in their order.

    key: of its template. Raises ValueError where they are not as many bytes as the layout says, StorageUnavailable
    where there is no memory, or no descriptor.
    """
    if [memoryview(view).nbytes for view in views] != [tensor.size_bytes for tensor in layout.tensors]:
        raise ValueError("a section has other bytes than its tensors' shapes say")
    end = owner(key)
    parts = [*zip(layout.offsets, views, strict=True), (layout.size_bytes - len(end), end)]
    return _file(parts, layout.size_bytes)


def drawn_file(drawn: DrawnTensors, key: str) -> tuple[int, int]:
    """The file of what a template was drawn with; its descriptor, which the caller closes, and its bytes.

    Raises StorageUnavailable where there is no memory, or no descriptor.
    """
    end, half = owner(key), drawn.size_bytes // 2
    parts = [(0, drawn.image_latent), (half, drawn.noise), (2 * half, end)]
    size_bytes = drawn.size_bytes + len(end)
    return _file(parts, size_bytes), size_bytes


def read_drawn(data: bytes, shape: tuple[int, ...]) -> DrawnTensors:
    """What `drawn_file` was given, of the bytes of its file. Raises ValueError."""
    view = memoryview(data)
    half = DrawnTensors.bytes_of(shape)
    return DrawnTensors(shape=shape, image_latent=view[:half], noise=view[half : 2 * half])


def _file(parts: Sequence[tuple[int, bytes | memoryview]], size_bytes: int) -> int:
    with os_errors.translated():
        descriptor = new_file("section")
        try:
            reserve(descriptor, size_bytes)  # what lies between the parts is zeros
            for place, part in parts:
                _write(descriptor, memoryview(part).cast("B"), place)
            seal(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _write(descriptor: int, rest: memoryview, place: int) -> None:
    while rest:
        done = os.pwrite(descriptor, rest, place)
        rest, place = rest[done:], place + done
