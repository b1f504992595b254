"""What the senders and receivers of all device backends have in common: slots, headers, and credit.

A DATA frame is followed by the announced bytes of the message's headers, as over TCP. The other bytes are moved in
pieces of a size that both ends compute alike.
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

from bottega.device_links.tensors import DeviceSlot, DeviceTensor, beside, has_come, mark, reached
from bottega.errors import DeadlineExceeded, LinkError, NoSharedMemory, TooLarge
from bottega.transport import Deadline, Layout, Part, SealedFile
from bottega.transport.backends.frame_stream import FrameStream, gone
from bottega.transport.channel.frames import Frame, FrameKind, cause_of_bye
from bottega.transport.memory import GrowingSlots

# Size of one operation: large enough to hide its launch, small enough that a slow link shows progress.
PIECE_BYTES = 64 << 20
# Seconds between two checks, during a wait for a device, whether the peer is still there.
_LOOK_S = 0.05
# For reads of a released message to finish. If they take longer, the device is stuck and its link is given up.
_READ_S = 60.0
_NOW = Deadline(at=0.0)
# Name of the links' memory in the messages that say who holds it.
_HOLDER = "links"


def pieces_of(memory: Tensor) -> Iterator[Tensor]:
    """Yield a flat tensor in pieces. Sender and receiver cut the same bytes into the same pieces."""
    for start in range(0, memory.nbytes, PIECE_BYTES):
        yield memory[start : start + PIECE_BYTES]


class SlotBudget(Protocol):
    """An account of device memory, such as a MemoryPlan."""

    def grow(self, name: str, change_bytes: int) -> None:
        """Reserve more bytes under a name, or fewer if negative. Raises TooLarge if not enough are left."""
        ...


class DeviceSlots:
    """Slots (message buffers) in device memory, by index. They are allocated at first use and grow when needed.

    After a call of `count_in`, their bytes are reserved in a budget.
    """

    def __init__(self, device: torch.device) -> None:
        self._budget: SlotBudget | None = None
        self._reserved_bytes = 0
        self._device = device
        self._headers = GrowingSlots()
        self._slots: dict[int, DeviceSlot] = {}

    def count_in(self, budget: SlotBudget) -> None:
        """Reserve device memory from this budget. Call it before the first slot is used."""
        self._budget = budget

    def get(self, index: int, size_bytes: int) -> DeviceSlot:
        """Return the slot, with at least that many bytes. Raises NoSharedMemory."""
        found = self._slots.get(index)
        if found is None or len(found) < size_bytes:
            wanted_bytes = max(size_bytes, *(len(slot) for slot in self._slots.values()), 0)
            if found is not None:
                del self._slots[index]
                self._take(-len(found))
            found = self._slots[index] = DeviceSlot(self._allocated(index, wanted_bytes), index, self._headers)
        return found

    def allocate(self, index: int, size_bytes: int) -> Tensor:
        """Return memory for a slot. Raises NoSharedMemory."""
        try:
            with beside(self._device):  # allocated in the stream that will write it
                memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise no_memory(size_bytes) from error
        if self._device.type == "cuda":
            # that stream may still read it when it is freed
            memory.record_stream(torch.cuda.default_stream(self._device))
        return memory

    def clear(self) -> None:
        """Drop all slots. Memory that is still referenced stays valid."""
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
    """Return the error for a slot that does not fit into device memory."""
    return NoSharedMemory(
        f"the device has no memory for a slot of {size_bytes} bytes: it is taken by models and activations",
        metadata={"cause": "device"},
    )


class _DeviceEnd(FrameStream):
    """The base of DeviceSender and DeviceReceiver. Frames are sent as on links between hosts' memories."""

    def __init__(self, connection: socket.socket, device: torch.device, slots: DeviceSlots | None = None) -> None:
        super().__init__(connection)
        self.device = device
        self.slots = slots or DeviceSlots(device)
        self._gone = select.poll()
        self._gone.register(connection, select.POLLRDHUP)

    def check_peer(self) -> None:
        """Raise PeerDead if the peer has disconnected, or the reason that its BYE frame gives."""
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
    """The sender of one direction. Backends override `move`, and `prepare` if needed."""

    passes_files = False

    def slot(self, index: int, size_bytes: int, deadline: Deadline) -> DeviceSlot:
        return self.slots.get(index, size_bytes)

    def stage(self, index: int, layout: Layout, parts: Sequence[Part], deadline: Deadline) -> list[Part]:
        slot = self.slot(index, layout.size_bytes, deadline)
        with beside(self.device):
            slot.fill(layout, parts)
            return slot.pieces(layout, *layout.span(0, len(layout.specs)))

    def attach_file(self, index: int, file: SealedFile, deadline: Deadline) -> None:
        raise ValueError("links between devices cannot pass files")

    def send_data(self, frame: Frame, pieces: Sequence[Part], deadline: Deadline) -> None:
        memory = [piece for piece in pieces if isinstance(piece, DeviceTensor)]
        for piece in memory:
            self.prepare(piece, deadline)
        headers = [piece for piece in pieces if isinstance(piece, memoryview)]
        self.write([memoryview(frame.pack()), *headers], deadline)
        for piece in memory:
            self.move(piece)

    def prepare(self, piece: DeviceTensor, deadline: Deadline) -> None:
        """Prepare the transfer before the receiver is told about the bytes. Raises DeadlineExceeded."""

    def move(self, piece: DeviceTensor) -> None:
        """Send the bytes, or enqueue sending them, after the receiver was told about them."""


class Inflow(Protocol):
    """A piece of a message that is being received into a slot."""

    def done(self, deadline: Deadline) -> bool:
        """Wait until the bytes have arrived; return False at the deadline. Raises LinkError."""
        ...


class DeviceReceiver(_DeviceEnd):
    """The receiver of one direction. Backends override `begin`, and `check_slot` if needed."""

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
        """Raise BadFrame if the memory that the sender shared is too small for this message."""

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
        """Enqueue receiving the bytes of the message in a slot, from byte `start` on, in the current stream."""
        raise NotImplementedError

    def finish(self, deadline: Deadline) -> None:
        """Wait for pending transfers after the end of the link."""
        if self._inflow is not None:
            self._inflow[0].done(deadline)

    def send_credit(self, frame: Frame) -> None:
        moment = mark(self.device)
        if moment is None or has_come(moment):
            super().send_credit(frame)
        else:
            self._credits.send(frame, moment)

    def send_late_credit(self, frame: Frame) -> None:
        """Give the sender credit for a message that the device has read. Only the thread of late credits calls it."""
        super().send_credit(frame)

    def close(self) -> None:
        super().close()
        self._credits.stop()
        self._open.clear()


class _LateCredits:
    """A thread that gives credit for messages once the device has read them. It starts with the first message."""

    def __init__(self, receiver: DeviceReceiver) -> None:
        self._receiver = receiver
        self._queue: queue.SimpleQueue[tuple[Frame, torch.cuda.Event] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, frame: Frame, moment: torch.cuda.Event) -> None:
        """Send a credit once the device has reached `moment`. The caller holds the lock that orders credits."""
        self._queue.put((frame, moment))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="link-credit", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (late := self._queue.get()) is not None:
            frame, moment = late
            try:
                if not reached(moment, Deadline.after(_READ_S)):
                    raise DeadlineExceeded(f"a message has not been read for {_READ_S:g} s; is the device stuck?")
                self._receiver.send_late_credit(frame)
            except LinkError as error:
                self._receiver.shut_down(error)  # the link notices it with its next frame
                return


class Moved:
    """An Inflow that the receiver's own device copies. It is done when the current stream has reached this point."""

    def __init__(self, device: torch.device) -> None:
        self._moment = mark(device)

    def done(self, deadline: Deadline) -> bool:
        return reached(self._moment, deadline)
