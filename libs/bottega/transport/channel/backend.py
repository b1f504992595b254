"""The interface between a link and what carries it: in each direction a sender backend and a receiver backend.

A link decides which frames are sent and when; a backend moves frames and bytes, and owns the slots.

What backends of devices (bottega.device_links) rely on:

- Frames go over a connection of the backend's own, one for each direction, and so do the tensors that are a message's
  header: nothing is parsed in memory of a device. What moves the other bytes belongs to one direction of one link.
- Sender and Receiver never read a slot's bytes: they hand on what `slot`, `open_slot` and `stage` return.
- Slots are few, long-lived, and known by index.
- `send_data` may be called when the work that fills the tensors is only enqueued, in the stream that is current then.
- `open_slot` is called when a message's header frame has been checked and before any byte is needed, `receive_data`
  after that: its DATA frame shows that the sender is there.
- Every call has a deadline, but a stuck device returns by none: `shut_down` may come at any time from any thread, by
  Link.end, and frees a thread that is stuck.
- `send_credit` is called when the consumer is done with a slot, or has enqueued in the stream that is current then all
  that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from bottega.errors import LinkError
from bottega.transport.channel.buffers import Part
from bottega.transport.channel.deadline import Deadline
from bottega.transport.channel.frames import Frame
from bottega.transport.layout import Layout
from bottega.transport.memory.sealed_file import SealedFile


class Backend(StrEnum):
    """What carries a link, the quickest first: pools of slots in memory of a device that two processes of a host share,
    a process group of NCCL or of Gloo, memory of the host that they share, and TCP."""

    CUDA_IPC = "cuda-ipc"
    NCCL = "nccl"
    GLOO = "gloo"
    MEMFD = "memfd"
    TCP = "tcp"

    @property
    def of_devices(self) -> bool:
        """Whether bottega.device_links has it."""
        return self not in {Backend.MEMFD, Backend.TCP}

    @property
    def within_host(self) -> bool:
        """Whether it links processes of one host only, which may share memory."""
        return self in {Backend.CUDA_IPC, Backend.MEMFD}

    @property
    def over_network(self) -> bool:
        """Whether its connections may be of TCP."""
        return not self.within_host


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """What carries the link, and why that."""

    backend: Backend
    reason: str


class SentSlot(Protocol):
    """A slot of the sender's: its memory, which one message after the other is written to."""

    def views(self, layout: Layout) -> tuple[Part, ...]:
        """Where each tensor of the layout lies; the slot is large enough."""
        ...

    def pieces(self, layout: Layout, start: int, stop: int) -> Sequence[Part]:
        """The bytes `start` to `stop` - 1 of a message of this layout, as `send_data` takes them."""
        ...


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

    def slot(self, index: int, size_bytes: int, deadline: Deadline) -> SentSlot:
        """Writable memory of at least that size, the same for an index as long as it is large enough.

        Raises NoSharedMemory, and DeadlineExceeded where the receiver has to be told.
        """
        ...

    def stage(self, index: int, layout: Layout, parts: Sequence[Part], deadline: Deadline) -> list[Part]:
        """Takes a whole message from the sender's own memory; returns what `send_data` has to be given.

        It must not change until the slot's credit is back.
        """
        ...

    def attach_file(self, index: int, file: SealedFile, deadline: Deadline) -> None:
        """Makes a file part of the slot's next message. Raises as `send_frame` does, and ValueError where none can be
        passed."""
        ...

    def send_frame(self, frame: Frame, deadline: Deadline) -> None:
        """Sends a frame with its payload. Raises DeadlineExceeded, after which the direction cannot be used."""
        ...

    def send_data(self, frame: Frame, pieces: Sequence[Part], deadline: Deadline) -> None:
        """Sends a DATA frame and moves the bytes that are ready now. Raises as `send_frame` does."""
        ...


class ReceiverBackend(BackendEnd, Protocol):
    """The receiver's end."""

    def open_slot(self, index: int, layout: Layout) -> tuple[Part, ...]:
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
