"""Tensors as parts of messages, message slots in device memory, and CUDA streams for a link's thread.

A link's thread works beside the engine. A CPU has no streams: work is done when the call returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bottega.transport import Deadline, Layout, Part
from bottega.transport.memory import GrowingSlots, Slot, copy

# Pauses between checks whether a device has reached a moment. The first are short, because most copies take
# microseconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3

_of_thread = threading.local()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that marks the current point of the current stream; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def beside(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """Enqueue the work of the block in this thread's own stream, after the event `after` of another stream."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield


def keep_until_used(tensor: Tensor) -> None:
    """Keep the memory of a tensor that another stream created until the current stream has read it."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def has_come(moment: torch.cuda.Event | None) -> bool:
    """Return whether the device has reached an event from `mark`; True for None."""
    return moment is None or bool(moment.query())  # type: ignore[no-untyped-call]


def reached(moment: torch.cuda.Event | None, deadline: Deadline) -> bool:
    """Wait until the device has reached an event from `mark`. Return False at the deadline."""
    pause_s = _FIRST_PAUSE_S
    while not has_come(moment):
        left_s = deadline.left_s()
        if left_s == 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def _stream(device: torch.device) -> torch.cuda.Stream:
    streams: dict[torch.device, torch.cuda.Stream] | None = getattr(_of_thread, "streams", None)
    if streams is None:
        streams = _of_thread.streams = {}
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]


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
