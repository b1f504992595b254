"""Tensors as parts of messages, and message slots in device memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bottega.device_links.streams import beside, keep_until_used, mark
from bottega.transport import Layout, Part
from bottega.transport.memory import GrowingSlots, Slot, copy


class DeviceTensor:
    """A DeviceBuffer over a flat uint8 tensor.

    Args:
        written: CUDA event after which the bytes are written; None if they are written already.
    """

    __slots__ = ("tensor", "written")

    def __init__(self, tensor: Tensor, written: torch.cuda.Event | None = None) -> None:
        self.tensor = tensor
        self.written = written

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def to_host(self) -> memoryview:
        """Return a copy in host memory. Waits only until the bytes are written."""
        with beside(self.tensor.device, self.written):
            data: memoryview = self.tensor.cpu().numpy().data
            keep_until_used(self.tensor)
        return data

    def copy_into(self, target: Tensor) -> None:
        """Enqueue a copy in the current stream, after the bytes are written."""
        if self.written is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.written)
        target.copy_(self.tensor, non_blocking=True)
        keep_until_used(self.tensor)


class DeviceSlot:
    """A slot in device memory, with host memory for headers at the same offsets."""

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
        """Return the memory of each tensor: host memory for headers, and for everything on a CPU device."""
        if self._layout is not layout:
            header = self.header(layout)
            self._views = tuple(
                header[offset:end] if index < layout.headers else part_of(self.memory[offset:end])
                for index, (offset, end) in enumerate(zip(layout.offsets, layout.ends, strict=True))
            )
            self._layout = layout
        return self._views

    def header(self, layout: Layout) -> memoryview:
        """Return host memory for the layout's headers."""
        if not layout.header_bytes:
            return memoryview(b"")
        slot: Slot = self._headers.get(self.index, layout.header_bytes)
        return slot.memory[: layout.header_bytes]

    def pieces(self, layout: Layout, start: int, stop: int) -> list[Part]:
        """Return the bytes `start` to `stop` - 1 of a message: a memoryview for headers, a DeviceTensor for the rest.

        The DeviceTensor counts as written when the current stream has reached this point.
        """
        split = min(max(start, layout.header_bytes), stop)
        pieces: list[Part] = []
        if start < split:
            pieces.append(self.header(layout)[start:split])
        if split < stop:
            pieces.append(DeviceTensor(self.memory[split:stop], mark(self.memory.device)))
        return pieces

    def fill(self, layout: Layout, parts: Sequence[Part]) -> None:
        """Copy a message into the slot, in the current stream."""
        for target, part in zip(self.views(layout), parts, strict=True):
            if isinstance(part, DeviceTensor):
                part.copy_into(bytes_of(target))
            elif isinstance(target, memoryview) and isinstance(part, memoryview):
                copy(target, part)
            else:
                bytes_of(target).copy_(bytes_of(part))


def part_of(memory: Tensor) -> Part:
    """Return a flat tensor as a part of a message: a memoryview if it is in host memory."""
    if memory.device.type == "cpu":
        view: memoryview = memory.numpy().data
        return view
    return DeviceTensor(memory)


def bytes_of(part: Part) -> Tensor:
    """Return a part of a message as a flat tensor without copying it. Write to it only if it belongs to a slot."""
    if isinstance(part, DeviceTensor):
        return part.tensor
    if not isinstance(part, memoryview):
        raise TypeError(f"{type(part).__name__} is not a part of a message of this process")
    # torch warns about read-only memory such as bytes. Large tensors come from writable memory.
    return torch.frombuffer(part if not part.readonly else bytearray(part), dtype=torch.uint8)
