"""The seam between a link and what carries it: one direction has an outlet at its sender and an inlet at its receiver.

A link decides what is said and when; a backend moves notices and bytes, and owns the slots. What backends are promised,
devices' ones included, stands in the package's description.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from bottega.errors import LinkError
from bottega.transport.channel.frames import Frame
from bottega.transport.deadline import Deadline
from bottega.transport.layout import Layout
from bottega.transport.memory.sealed_file import SealedFile
from bottega.transport.memory.slots import Slot


class Backend(StrEnum):
    """What carries a link."""

    PROCESS = "process"
    MEMFD = "memfd"
    TCP = "tcp"

    @property
    def within_host(self) -> bool:
        """Whether it links nobody but processes of one host."""
        return self is not Backend.TCP


class BackendEnd(Protocol):
    """What both ends of a direction can do. All but `shut` is called by one thread at a time."""

    def hear(self, deadline: Deadline) -> Frame | None:
        """The peer's next notice, with its payload; None when there is none by the deadline.

        It can be called again after that: what has come of a notice is kept. Raises PeerDead at the end of the
        connection, BadFrame for what is no notice.
        """
        ...

    def shut(self, cause: LinkError) -> None:
        """Tells the peer, if that takes no waiting to speak of, and wakes whoever waits here; then `hear` raises
        PeerDead.

        Any thread may call it, at any time: a monitor ends links whose own thread is stuck in a call.
        """
        ...

    def close(self) -> None:
        """Gives descriptors and slots back, after `shut`; memory that somebody looks at stays."""
        ...


class SenderBackend(BackendEnd, Protocol):
    """The sender's end."""

    @property
    def passes_files(self) -> bool:
        """Whether `attach` does anything but raise."""
        ...

    def slot(self, index: int, size_bytes: int, deadline: Deadline) -> Slot:
        """Writable memory of at least that size, the same for an index as long as it is large enough.

        Raises NoSharedMemory, and DeadlineExceeded where the receiver has to be told.
        """
        ...

    def stage(self, index: int, layout: Layout, buffers: Sequence[memoryview], deadline: Deadline) -> list[memoryview]:
        """Takes a whole message from the sender's own buffers; returns what `move` has to be given.

        The buffers must not change until the slot's credit is back.
        """
        ...

    def attach(self, index: int, file: SealedFile, deadline: Deadline) -> None:
        """Makes a file part of the slot's next message. Raises as `tell` does, and ValueError where none can be
        passed."""
        ...

    def tell(self, frame: Frame, deadline: Deadline) -> None:
        """Sends a notice with its payload. Raises DeadlineExceeded, after which the direction cannot be used."""
        ...

    def move(self, frame: Frame, pieces: Sequence[memoryview], deadline: Deadline) -> None:
        """Sends a DATA notice and moves the bytes that are ready now. Raises as `tell` does."""
        ...


class ReceiverBackend(BackendEnd, Protocol):
    """The receiver's end."""

    def open(self, index: int, layout: Layout) -> tuple[memoryview, ...]:
        """Where each tensor of the message in this slot will be. Called once a message, before any byte moves."""
        ...

    def file(self, index: int) -> memoryview | None:
        """The bytes of the file that is part of the message in this slot; None where there is none. Called once a
        message, after `open`."""
        ...

    def fill(self, index: int, start: int, stop: int, deadline: Deadline) -> int:
        """Brings the slot's bytes `start` to `stop` - 1, as far as they come in time; returns how many did."""
        ...

    def grant(self, frame: Frame) -> None:
        """Sends a CREDIT. It never waits; any thread may call it."""
        ...
