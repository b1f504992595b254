"""The ends of a link between devices that do not depend on what moves the bytes: slots, headers, and credit.

A DATA frame is followed by what it announces of the message's headers, as over TCP; the other bytes are moved in pieces
that both ends cut alike.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from bottega.device_links.streams import beside, has_come, mark, reached
from bottega.device_links.tensors import DeviceSlot, DeviceTensor
from bottega.errors import DeadlineExceeded, LinkError, NoSharedMemory, TooLarge
from bottega.transport import Deadline, Layout, Part, SealedFile
from bottega.transport.backends.frame_stream import FrameStream, gone
from bottega.transport.channel.frames import Frame, FrameKind, cause_of_bye
from bottega.transport.memory.slots import GrowingSlots

# Of one operation: large enough that its launch costs nothing beside it, small enough that a slow link shows progress.
PIECE_BYTES = 64 << 20
# How often a wait for a device looks whether the peer is there.
_LOOK_S = 0.05
# For what reads a message that was given back. Longer, and the device is stuck; its link is given up for that.
_READ_S = 60.0
_NOW = Deadline(at=0.0)
# As others read it who find no room.
_HOLDER = "links"


def pieces_of(memory: Tensor) -> Iterator[Tensor]:
    """Flat bytes, as both ends cut them."""
    for start in range(0, memory.nbytes, PIECE_BYTES):
        yield memory[start : start + PIECE_BYTES]


class SlotBudget(Protocol):
    """Where memory of a device is set aside, such as a MemoryPlan."""

    def grow(self, name: str, change_bytes: int) -> None:
        """Sets so many bytes more aside for that name, negative for less. Raises TooLarge where they are not left."""
        ...


class DeviceSlots:
    """Slots of a device by index, made when they are first used, which grow as those of the host do.

    Their bytes are counted where `count_in` was called.
    """

    def __init__(self, device: torch.device) -> None:
        self._budget: SlotBudget | None = None
        self._reserved_bytes = 0
        self._device = device
        self._headers = GrowingSlots()
        self._slots: dict[int, DeviceSlot] = {}

    def count_in(self, budget: SlotBudget) -> None:
        """Asks this before it takes memory of the device. Before the first slot is used."""
        self._budget = budget

    def get(self, index: int, size_bytes: int) -> DeviceSlot:
        """The slot, with at least that many bytes. Raises NoSharedMemory."""
        found = self._slots.get(index)
        if found is None or len(found) < size_bytes:
            wanted_bytes = max(size_bytes, *(len(slot) for slot in self._slots.values()), 0)
            if found is not None:
                del self._slots[index]
                self._take(-len(found))
            found = self._slots[index] = DeviceSlot(self._allocated(index, wanted_bytes), index, self._headers)
        return found

    def allocate(self, index: int, size_bytes: int) -> Tensor:
        """Memory for one. Raises NoSharedMemory."""
        try:
            with beside(self._device):  # of the stream that will write it
                memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise no_memory(size_bytes) from error
        if self._device.type == "cuda":
            memory.record_stream(torch.cuda.default_stream(self._device))  # it may be read there when it is freed
        return memory

    def clear(self) -> None:
        """Forgets all; memory that somebody looks at stays."""
        self._slots.clear()
        self._headers.clear()
        self._take(-self._reserved_bytes)

    def _allocated(self, index: int, size_bytes: int) -> Tensor:
        try:
            self._take(size_bytes)
        except TooLarge as error:
            raise no_memory(size_bytes) from error
        try:
            return self.allocate(index, size_bytes)
        except BaseException:
            self._take(-size_bytes)
            raise

    def _take(self, change_bytes: int) -> None:
        if self._budget is not None:
            self._budget.grow(_HOLDER, change_bytes)
        self._reserved_bytes += change_bytes


def no_memory(size_bytes: int) -> NoSharedMemory:
    """The device has none for a slot."""
    return NoSharedMemory(
        f"the device has no memory for a slot of {size_bytes} bytes: it is taken by models and activations",
        metadata={"cause": "device"},
    )


class _DeviceEnd(FrameStream):
    """What both ends have. Frames go as they do over memory of the host."""

    def __init__(self, connection: socket.socket, device: torch.device, slots: DeviceSlots | None = None) -> None:
        super().__init__(connection)
        self.device = device
        self.slots = slots or DeviceSlots(device)
        self._gone = select.poll()
        self._gone.register(connection, select.POLLRDHUP)

    def check_peer(self) -> None:
        """Raises PeerDead where the peer has left, or why it said that it would."""
        if not self._gone.poll(0):
            return
        frame = super().receive_frame(_NOW)
        if frame is not None and frame.kind == FrameKind.BYE:
            raise cause_of_bye(frame)
        raise gone()

    def close(self) -> None:
        super().close()
        self.slots.clear()


class DeviceSender(_DeviceEnd):
    """The sender's end; what moves the bytes says `move`."""

    passes_files = False

    def slot(self, index: int, size_bytes: int, deadline: Deadline) -> DeviceSlot:
        return self.slots.get(index, size_bytes)

    def stage(self, index: int, layout: Layout, parts: Sequence[Part], deadline: Deadline) -> list[Part]:
        slot = self.slot(index, layout.size_bytes, deadline)
        with beside(self.device):
            slot.fill(layout, parts)
            return slot.pieces(layout, *layout.span(0, len(layout.specs)))

    def attach_file(self, index: int, file: SealedFile, deadline: Deadline) -> None:
        raise ValueError("links between devices pass no files")

    def send_data(self, frame: Frame, pieces: Sequence[Part], deadline: Deadline) -> None:
        memory = [piece for piece in pieces if isinstance(piece, DeviceTensor)]
        for piece in memory:
            self.prepare(piece, deadline)
        headers = [piece for piece in pieces if isinstance(piece, memoryview)]
        self.write([memoryview(frame.pack()), *headers], deadline)
        for piece in memory:
            self.move(piece)

    def prepare(self, piece: DeviceTensor, deadline: Deadline) -> None:
        """Does what has to be done before the receiver is told of the bytes. Raises DeadlineExceeded."""

    def move(self, piece: DeviceTensor) -> None:
        """Sends the bytes, or enqueues that, once the receiver has been told."""


class Inflow(Protocol):
    """Some of a message's bytes on their way into a slot."""

    def done(self, deadline: Deadline) -> bool:
        """Waits until they are there; False where they are not by the deadline. Raises LinkError."""
        ...


class DeviceReceiver(_DeviceEnd):
    """The receiver's end; what moves the bytes says `begin`."""

    def __init__(self, connection: socket.socket, device: torch.device) -> None:
        super().__init__(connection, device)
        self._open: dict[int, tuple[DeviceSlot, Layout]] = {}
        self._inflow: tuple[Inflow, int] | None = None
        self._credits = _LateCredits(self)

    def open_slot(self, index: int, layout: Layout) -> tuple[Part, ...]:
        self.check_slot(index, layout)
        slot = self.slots.get(index, layout.size_bytes)
        self._open[index] = slot, layout
        return slot.views(layout)

    def check_slot(self, index: int, layout: Layout) -> None:
        """Raises BadFrame where the sender has no memory for such a message."""

    def pop_file(self, index: int) -> memoryview | None:
        return None

    def receive_data(self, index: int, start: int, stop: int, deadline: Deadline) -> int:
        slot, layout = self._open[index]
        if start < layout.header_bytes:
            return self.read_bulk(slot.header(layout)[start : min(stop, layout.header_bytes)], deadline)
        if self._inflow is None:
            size = min(stop - start, PIECE_BYTES)
            with beside(self.device):
                self._inflow = self.begin(index, slot.memory[start : start + size], start), size
        inflow, size = self._inflow
        while not inflow.done(deadline.sooner(_LOOK_S)):
            self.check_peer()
            if deadline.left_s() == 0:
                return 0
        self._inflow = None
        return size

    def begin(self, index: int, target: Tensor, start: int) -> Inflow:
        """Enqueues bringing the bytes of the message in that slot, from `start` on, in the stream that is current."""
        raise NotImplementedError

    def finish(self, deadline: Deadline) -> None:
        """Waits for bytes that are on their way when the link has ended."""
        if self._inflow is not None:
            self._inflow[0].done(deadline)

    def send_credit(self, frame: Frame) -> None:
        moment = mark(self.device)
        if moment is None or has_come(moment):
            super().send_credit(frame)
        else:
            self._credits.send(frame, moment)

    def send_late_credit(self, frame: Frame) -> None:
        """By the thread of late credits."""
        super().send_credit(frame)

    def close(self) -> None:
        super().close()
        self._credits.stop()
        self._open.clear()


class _LateCredits:
    """Gives credit for messages that work on the device still reads, when it has. Its thread begins with the first."""

    def __init__(self, receiver: DeviceReceiver) -> None:
        self._receiver = receiver
        self._queue: queue.SimpleQueue[tuple[Frame, torch.cuda.Event] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, frame: Frame, moment: torch.cuda.Event) -> None:
        """Under the lock that all credit is given under."""
        self._queue.put((frame, moment))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="link-credit", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread, soon."""
        self._queue.put(None)

    def _run(self) -> None:
        while (late := self._queue.get()) is not None:
            frame, moment = late
            try:
                if not reached(moment, Deadline.after(_READ_S)):
                    raise DeadlineExceeded(f"what reads a message has been enqueued for {_READ_S:g} s; is it stuck?")
                self._receiver.send_late_credit(frame)
            except LinkError as error:
                self._receiver.shut_down(error)  # the link learns of it by its next frame
                return


class Moved:
    """An inflow that the receiver's own device brings: done when the stream that was current has come so far."""

    def __init__(self, device: torch.device) -> None:
        self._moment = mark(device)

    def done(self, deadline: Deadline) -> bool:
        return reached(self._moment, deadline)
