"""Tensors as parts of messages, and slots of a device's memory that messages lie in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bottega.device_links.streams import beside, keep_until_used, mark
from bottega.transport import Layout, Part
from bottega.transport.memory.copying import copy
from bottega.transport.memory.slots import GrowingSlots, Slot


class DeviceTensor:
    """A DeviceBuffer: bytes, a flat uint8 tensor.

    written: the moment when they are, in the stream that writes them; None where they are now.
    """

    __slots__ = ("tensor", "written")

    def __init__(self, tensor: Tensor, written: torch.cuda.Event | None = None) -> None:
        self.tensor = tensor
        self.written = written

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def to_host(self) -> memoryview:
        """A copy in memory of the host. It waits until the bytes are written, and for no more."""
        with beside(self.tensor.device, self.written):
            data: memoryview = self.tensor.cpu().numpy().data
            keep_until_used(self.tensor)
        return data

    def copy_into(self, target: Tensor) -> None:
        """Enqueues a copy in the stream that is current, behind what writes the bytes."""
        if self.written is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.written)
        target.copy_(self.tensor, non_blocking=True)
        keep_until_used(self.tensor)


class DeviceSlot:
    """A slot of the device's memory, and memory of the host for headers, which are at the same offsets."""

    __slots__ = ("_headers", "_layout", "_views", "index", "memory")

    def __init__(self, memory: Tensor, index: int, headers: GrowingSlots) -> None:
        self.memory = memory
        self.index = index
        self._headers = headers
        self._layout: Layout | None = None
        self._views: tuple[Part, ...] = ()

    def __len__(self) -> int:
        return self.memory.nbytes

    def views(self, layout: Layout) -> tuple[Part, ...]:
        """Where each tensor of the layout lies: headers in memory of the host, as is all of a device that is none."""
        if self._layout is not layout:
            header = self.header(layout)
            self._views = tuple(
                header[offset:end] if index < layout.headers else part_of(self.memory[offset:end])
                for index, (offset, end) in enumerate(zip(layout.offsets, layout.ends, strict=True))
            )
            self._layout = layout
        return self._views

    def header(self, layout: Layout) -> memoryview:
        """Memory of the host for the layout's headers."""
        if not layout.header_bytes:
            return memoryview(b"")
        slot: Slot = self._headers.get(self.index, layout.header_bytes)
        return slot.memory[: layout.header_bytes]

    def pieces(self, layout: Layout, start: int, stop: int) -> list[Part]:
        """The bytes `start` to `stop` - 1 of a message: of headers a memoryview, of the rest a DeviceTensor, written
        when the stream that is current has come so far."""
        split = min(max(start, layout.header_bytes), stop)
        pieces: list[Part] = []
        if start < split:
            pieces.append(self.header(layout)[start:split])
        if split < stop:
            pieces.append(DeviceTensor(self.memory[split:stop], mark(self.memory.device)))
        return pieces

    def fill(self, layout: Layout, parts: Sequence[Part]) -> None:
        """Copies a message into the slot, in the stream that is current."""
        for target, part in zip(self.views(layout), parts, strict=True):
            if isinstance(part, DeviceTensor):
                part.copy_into(bytes_of(target))
            elif isinstance(target, memoryview) and isinstance(part, memoryview):
                copy(target, part)
            else:
                bytes_of(target).copy_(bytes_of(part))


def part_of(memory: Tensor) -> Part:
    """Flat bytes as a message's part: of memory of the host a memoryview."""
    if memory.device.type == "cpu":
        view: memoryview = memory.numpy().data
        return view
    return DeviceTensor(memory)


def bytes_of(part: Part) -> Tensor:
    """A part as flat bytes, where it lies. It is not to be written to, unless it is a slot's."""
    if isinstance(part, DeviceTensor):
        return part.tensor
    if not isinstance(part, memoryview):
        raise TypeError(f"{type(part).__name__} is no part of a message that this process has made")
    # torch warns of memory that is read-only, such as bytes; large tensors come from memory that is not.
    return torch.frombuffer(part if not part.readonly else bytearray(part), dtype=torch.uint8)
