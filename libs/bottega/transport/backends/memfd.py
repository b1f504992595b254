"""Links between processes on one host: messages are in sealed shared memory, frames go over a unix socket.

The sender owns the slots (message buffers) and writes them in place or copies into them. The receiver maps the same
pages and cannot write them. The memory of a slot is passed once, when it is first used or has to grow; a file is passed
with its message. Both are mapped on arrival and their descriptors are closed.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence

from bottega.errors import BadFrame
from bottega.transport.backends.frame_stream import FrameStream
from bottega.transport.channel.backend import Deadline, Limits, Part, on_host
from bottega.transport.channel.frames import Frame, FrameKind
from bottega.transport.layout import Layout
from bottega.transport.memory import GrowingSlots, SealedFile, Slot, copy, received_file, received_slot, shared_slot

_WITH_DESCRIPTOR = frozenset({FrameKind.SEGMENT, FrameKind.FILE})


class MemfdSender(FrameStream):
    """The sender of one direction over shared memory."""

    passes_files = True

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._slots = GrowingSlots()

    def slot(self, index: int, size_bytes: int, deadline: Deadline) -> Slot:
        return self._slots.get(index, size_bytes, lambda wanted_bytes: self._share(index, wanted_bytes, deadline))

    def stage(self, index: int, layout: Layout, parts: Sequence[Part], deadline: Deadline) -> list[Part]:
        slot = self.slot(index, layout.size_bytes, deadline)
        for target, source in zip(slot.views(layout), on_host(parts), strict=True):
            copy(target, source)
        return []

    def attach_file(self, index: int, file: SealedFile, deadline: Deadline) -> None:
        frame = Frame(FrameKind.FILE, slot=index, size=file.size_bytes)
        self.send_frame_with_descriptor(frame, file.descriptor, deadline)

    def send_data(self, frame: Frame, pieces: Sequence[Part], deadline: Deadline) -> None:
        # The bytes are in place already. The system call orders them before the frame for other processors.
        self.send_frame(frame, deadline)

    def close(self) -> None:
        super().close()
        self._slots.clear()

    def _share(self, index: int, size_bytes: int, deadline: Deadline) -> mmap.mmap:
        descriptor, mapping = shared_slot(size_bytes)
        try:
            frame = Frame(FrameKind.SEGMENT, slot=index, size=len(mapping))
            self.send_frame_with_descriptor(frame, descriptor, deadline)
        finally:
            os.close(descriptor)
        return mapping


class MemfdReceiver(FrameStream):
    """The receiver of one direction over shared memory."""

    def __init__(self, connection: socket.socket, limits: Limits) -> None:
        super().__init__(connection)
        self._limits = limits
        self._slots: dict[int, Slot] = {}
        # The file of the next message, by slot.
        self._files: dict[int, memoryview] = {}
        self._expected: Frame | None = None

    def receive_frame(self, deadline: Deadline) -> Frame | None:
        while True:
            if self._expected is None:
                frame = super().receive_frame(deadline)
                if frame is None or frame.kind not in _WITH_DESCRIPTOR:
                    return frame
                self._expected = frame
            if not self.wait_readable(deadline):
                return None
            announced, self._expected = self._expected, None
            self._map_memory(announced)

    def open_slot(self, index: int, layout: Layout) -> tuple[memoryview, ...]:
        slot = self._slots.get(index)
        if slot is None or len(slot) < layout.size_bytes:
            raise BadFrame("the peer sent a message that is larger than the memory that it shared for it")
        return slot.views(layout)

    def pop_file(self, index: int) -> memoryview | None:
        return self._files.pop(index, None)

    def receive_data(self, index: int, start: int, stop: int, deadline: Deadline) -> int:
        return stop - start  # the bytes are in place already

    def close(self) -> None:
        super().close()
        self._slots.clear()
        self._files.clear()

    def _map_memory(self, announced: Frame) -> None:
        descriptor = self.receive_descriptor()
        try:
            if announced.slot >= self._limits.slots or not 0 < announced.size <= self._limits.segment_bytes:
                raise BadFrame(f"the peer shares slot {announced.slot} of {announced.size} bytes, beyond the limits")
            if announced.kind == FrameKind.FILE:
                self._files[announced.slot] = received_file(descriptor, announced.size)
            else:
                self._slots.pop(announced.slot, None)
                self._slots[announced.slot] = Slot(received_slot(descriptor, announced.size))
        finally:
            os.close(descriptor)
