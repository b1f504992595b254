"""The interface between a link and what carries it: in each direction a sender backend and a receiver backend.

A link decides which frames are sent and when; a backend moves frames and bytes, and owns the slots.

What a backend of devices, which will stand beside memfd.py and tcp.py, can rely on:

- Frames go over a connection of the backend's own, one for each direction: a device backend keeps one (unix or TCP,
  frame_stream.py) for frames, and moves bytes beside it. So a process group (ProcessGroupNCCL) or slot pool (CUDA IPC)
  for each direction fits, and no two links share one.
- Sender and Receiver never read a slot's bytes: they hand on what `slot`, `open_slot` and `stage` return. A device
  backend's slot is a device tensor in the place of the memoryview, sliced by the same offsets (64-byte aligned, slots
  by page), and `views` and `view` return slices of it.
- Slots are few, long-lived, and known by index. Memory is exported once for each (one cudaMalloc each, no expandable
  segments) and announced by a SEGMENT. It is unmapped in `close`, which comes when the peer is known to be dead, not at
  the next handshake. `slot` is called before anything is written, with the size of the message.
- `send_data` may be called when the work that fills the tensors is only enqueued: the backend owns a stream for each
  direction, makes it wait for the caller's current one, and sends DATA when its copy is enqueued or done, whichever
  its receiver needs.
- `open_slot` is called when the header has been checked and before any byte is needed, `receive_data` after that. A
  backend that must not post a receive before the sender has come (NCCL) posts it in `receive_data`, because the DATA
  frame shows that the sender is there; one whose sender must not start before the receive is posted answers from
  `open_slot`.
- Every call has a deadline, but a stuck kernel returns by none: `shut_down` may come at any time from any thread, by
  Link.end, and must free a thread that is stuck (ProcessGroupNCCL.abort()).
- `send_credit` is called when the consumer is done with a slot; a backend whose consumers enqueue work records an event
  there and lets the frame wait for it.
- Two ends on one device, two ranks of one group, device numbers and peer access are for the backend's probe, which
  comes before memfd in `connect`, and says why when it does not pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from bottega.errors import LinkError
from bottega.transport.channel.deadline import Deadline
from bottega.transport.channel.frames import Frame
from bottega.transport.layout import Layout
from bottega.transport.memory.sealed_file import SealedFile
from bottega.transport.memory.slots import Slot


class Backend(StrEnum):
    """What carries a link."""

    MEMFD = "memfd"
    TCP = "tcp"

    @property
    def within_host(self) -> bool:
        """Whether it links processes of one host only."""
        return self is not Backend.TCP


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """What carries the link, and why that."""

    backend: Backend
    reason: str


class BackendEnd(Protocol):
    """What both ends of a direction can do. All but `shut_down` is called by one thread at a time."""

    def receive_frame(self, deadline: Deadline) -> Frame | None:
        """The peer's next frame, with its payload; None when there is none by the deadline.

        It can be called again after that: what has come of a frame is kept. Raises PeerDead at the end of the
        connection, BadFrame for what is no frame.
        """
        ...

    def shut_down(self, cause: LinkError) -> None:
        """Sends the peer a BYE if that takes hardly any waiting, and wakes threads that wait here; then `receive_frame`
        raises PeerDead.

        Any thread may call it, at any time: a monitor ends links whose own thread is stuck in a call.
        """
        ...

    def close(self) -> None:
        """Gives descriptors and slots back, after `shut_down`; memory that somebody looks at stays."""
        ...


class SenderBackend(BackendEnd, Protocol):
    """The sender's end."""

    @property
    def passes_files(self) -> bool:
        """Whether `attach_file` does anything but raise."""
        ...

    def slot(self, index: int, size_bytes: int, deadline: Deadline) -> Slot:
        """Writable memory of at least that size, the same for an index as long as it is large enough.

        Raises NoSharedMemory, and DeadlineExceeded where the receiver has to be told.
        """
        ...

    def stage(self, index: int, layout: Layout, buffers: Sequence[memoryview], deadline: Deadline) -> list[memoryview]:
        """Takes a whole message from the sender's own buffers; returns what `send_data` has to be given.

        The buffers must not change until the slot's credit is back.
        """
        ...

    def attach_file(self, index: int, file: SealedFile, deadline: Deadline) -> None:
        """Makes a file part of the slot's next message. Raises as `send_frame` does, and ValueError where none can be
        passed."""
        ...

    def send_frame(self, frame: Frame, deadline: Deadline) -> None:
        """Sends a frame with its payload. Raises DeadlineExceeded, after which the direction cannot be used."""
        ...

    def send_data(self, frame: Frame, pieces: Sequence[memoryview], deadline: Deadline) -> None:
        """Sends a DATA frame and moves the bytes that are ready now. Raises as `send_frame` does."""
        ...


class ReceiverBackend(BackendEnd, Protocol):
    """The receiver's end."""

    def open_slot(self, index: int, layout: Layout) -> tuple[memoryview, ...]:
        """Where each tensor of the message in this slot will be. Called once a message, before any byte moves."""
        ...

    def pop_file(self, index: int) -> memoryview | None:
        """The bytes of the file that is part of the message in this slot; None where there is none. Called once a
        message, after `open_slot`."""
        ...

    def receive_data(self, index: int, start: int, stop: int, deadline: Deadline) -> int:
        """Brings the slot's bytes `start` to `stop` - 1, as far as they come in time; returns how many did."""
        ...

    def send_credit(self, frame: Frame) -> None:
        """Sends a CREDIT. It never waits; any thread may call it."""
        ...
