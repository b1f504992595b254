"""Links between hosts: each direction has a TCP connection for frames and messages, sealed in records.

The sender gathers from the caller's buffers or from its own slots. The receiver reads straight into its slots, so only
the system copies the bytes.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from bottega.transport.backends.frame_stream import FrameStream
from bottega.transport.backends.records import Records
from bottega.transport.channel.backend import Deadline, Part, on_host
from bottega.transport.channel.frames import Frame
from bottega.transport.layout import Layout
from bottega.transport.memory import GrowingSlots, SealedFile, Slot

# A host that vanished silently is noticed after about 10 + 3 x 3 seconds.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3))


def tune(connection: socket.socket) -> None:
    """Set TCP_NODELAY and keepalive on a link's connection.

    The system sizes the buffers by the path's delay. With fixed buffers of 4 MiB, transfers within a host took half as
    long again, because the bytes leave the processor's cache meanwhile.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class TcpSender(FrameStream):
    """The sender of one direction over TCP."""

    passes_files = False

    def __init__(self, connection: socket.socket, records: Records | None = None) -> None:
        super().__init__(connection, records)
        self._slots = GrowingSlots()

    def slot(self, index: int, size_bytes: int, deadline: Deadline) -> Slot:
        return self._slots.get(index, size_bytes)

    def stage(self, index: int, layout: Layout, parts: Sequence[Part], deadline: Deadline) -> list[Part]:
        pieces: list[Part] = []
        end = 0
        for offset, buffer in zip(layout.offsets, on_host(parts), strict=True):
            if offset > end:
                pieces.append(memoryview(bytes(offset - end)))
            pieces.append(buffer)
            end = offset + len(buffer)
        return pieces

    def attach_file(self, index: int, file: SealedFile, deadline: Deadline) -> None:
        raise ValueError("links over TCP cannot pass files")

    def send_data(self, frame: Frame, pieces: Sequence[Part], deadline: Deadline) -> None:
        self.write([memoryview(frame.pack()), *on_host(pieces)], deadline)

    def close(self) -> None:
        super().close()
        self._slots.clear()


class TcpReceiver(FrameStream):
    """The receiver of one direction over TCP."""

    def __init__(self, connection: socket.socket, records: Records | None = None) -> None:
        super().__init__(connection, records)
        self._slots = GrowingSlots()
        self._open: dict[int, Slot] = {}

    def open_slot(self, index: int, layout: Layout) -> tuple[memoryview, ...]:
        slot = self._open[index] = self._slots.get(index, layout.size_bytes)
        return slot.views(layout)

    def pop_file(self, index: int) -> memoryview | None:
        return None

    def receive_data(self, index: int, start: int, stop: int, deadline: Deadline) -> int:
        return self.read_bulk(self._open[index].memory[start:stop], deadline)

    def close(self) -> None:
        super().close()
        self._slots.clear()
        self._open.clear()
