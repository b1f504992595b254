"""Links within a host over shared device memory.

Each slot (message buffer) of the sender is device memory that is exported once. The receiver copies from it into slots
on its own device, so it does not depend on memory that ends with the sender. The sender announces bytes only when they
are written, because the receiver's operations are not ordered with the sender's streams.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from torch import Tensor

from bottega.device_links.ends import DeviceReceiver, DeviceSender, DeviceSlots, Inflow, Moved
from bottega.device_links.shared_memory import HANDLE_BYTES, Export, Mapped, SharedMemory, free_when_unmapped
from bottega.device_links.tensors import DeviceTensor, reached
from bottega.errors import BadFrame, DeadlineExceeded
from bottega.transport import Deadline, Layout, Limits
from bottega.transport.channel.frames import Frame, FrameKind

# A slot is announced before its first message. A peer that reads no frames takes no message either.
_ANNOUNCE_S = 5.0
# For a copy that still runs when its link ends, which takes milliseconds.
_COPY_S = 5.0

_Announce = Callable[[int, int, socket.socket], None]


class PoolSender(DeviceSender):
    """The sender of one direction over shared device memory."""

    def __init__(self, connection: socket.socket, memory: SharedMemory) -> None:
        super().__init__(connection, memory.device, _ExportedSlots(memory, self._announce))

    def prepare(self, piece: DeviceTensor, deadline: Deadline) -> None:
        if not reached(piece.written, deadline):
            raise DeadlineExceeded("the device, which is busy or stuck, did not write a message in time")

    def _announce(self, index: int, size_bytes: int, held: socket.socket) -> None:
        frame = Frame(FrameKind.SEGMENT, slot=index, size=size_bytes)
        self.send_frame_with_descriptor(frame, held.fileno(), Deadline.after(_ANNOUNCE_S))


class _ExportedSlots(DeviceSlots):
    """Slots in exported device memory.

    Args:
        announce: Tells the receiver about the memory of a slot.
    """

    def __init__(self, memory: SharedMemory, announce: _Announce) -> None:
        super().__init__(memory.device)
        self._shared = memory
        self._announce = announce
        self._exports: dict[int, Export] = {}
        # Memory of slots that have grown, until the receiver has mapped the new memory.
        self._outgrown: list[Export] = []

    def allocate(self, index: int, size_bytes: int) -> Tensor:
        for export in [export for export in self._outgrown if not export.mapped]:
            self._outgrown.remove(export)
            export.free()
        export, held = Export.of(self._shared.export(size_bytes))
        if (before := self._exports.pop(index, None)) is not None:
            self._outgrown.append(before)
        self._exports[index] = export
        with held:
            self._announce(index, size_bytes, held)
        return export.memory

    def clear(self) -> None:
        super().clear()
        free_when_unmapped([*self._outgrown, *self._exports.values()])
        self._outgrown.clear()
        self._exports.clear()


class PoolReceiver(DeviceReceiver):
    """The receiver of one direction over shared device memory."""

    def __init__(self, connection: socket.socket, memory: SharedMemory, limits: Limits) -> None:
        super().__init__(connection, memory.device)
        self._shared = memory
        self._limits = limits
        self._segments: dict[int, _MappedSlot] = {}
        self._expected: Frame | None = None

    def receive_frame(self, deadline: Deadline) -> Frame | None:
        while True:
            if self._expected is None:
                frame = super().receive_frame(deadline)
                if frame is None or frame.kind != FrameKind.SEGMENT:
                    return frame
                self._expected = frame
            if not self.wait_readable(deadline):
                return None
            announced, self._expected = self._expected, None
            self._map(announced)

    def check_slot(self, index: int, layout: Layout) -> None:
        segment = self._segments.get(index)
        if segment is None or segment.size_bytes < layout.size_bytes:
            raise BadFrame("the peer sent a message that is larger than the memory that it shared for it")

    def begin(self, index: int, target: Tensor, start: int) -> Inflow:
        self._segments[index].mapped.copy_to(target, start)
        return Moved(self.device)

    def close(self) -> None:
        super().close()
        self.finish(Deadline.after(_COPY_S))
        for segment in self._segments.values():
            segment.give_up()
        self._segments.clear()

    def _map(self, announced: Frame) -> None:
        """Map the memory whose handle waits in the socket that arrives with the next byte."""
        held = self._receive_socket()
        try:
            if announced.slot >= self._limits.slots or not 0 < announced.size <= self._limits.segment_bytes:
                raise BadFrame(f"the peer shares slot {announced.slot} of {announced.size} bytes, beyond the limits")
            handle = held.recv(HANDLE_BYTES, socket.MSG_DONTWAIT)
            if len(handle) != HANDLE_BYTES:
                raise BadFrame("the peer shares memory without a handle for it")
            mapped = self._shared.map(handle, announced.size)
        except BaseException as error:
            held.close()
            if isinstance(error, OSError):
                raise BadFrame(f"the peer shares memory that cannot be mapped: {error.strerror or error}") from error
            raise
        if (before := self._segments.pop(announced.slot, None)) is not None:
            before.give_up()
        self._segments[announced.slot] = _MappedSlot(mapped, announced.size, held)

    def _receive_socket(self) -> socket.socket:
        descriptor = self.receive_descriptor()
        try:
            return socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            raise BadFrame("the peer sent a descriptor that is not a socket to share memory") from None


class _MappedSlot:
    """A slot of the sender, mapped into this process. Closing `held` tells the sender that the memory is unmapped."""

    def __init__(self, mapped: Mapped, size_bytes: int, held: socket.socket) -> None:
        self.mapped = mapped
        self.size_bytes = size_bytes
        self._held = held

    def give_up(self) -> None:
        try:
            self.mapped.unmap()
        finally:
            self._held.close()
