"""The interfaces between a link, its backends and the devices of their process, with the limits and deadlines of links.

There is a sender backend and a receiver backend in each direction. A message has a part for each of its tensors, in
host or device memory, and an optional file.

A link decides which frames are sent and when. A backend moves frames and bytes, and owns the slots.

Backends of devices (bottega.device_links) rely on these rules:

- The backend has its own connection for each direction. Frames and the tensors of a message's header go over it,
  because nothing is parsed in device memory. The mechanism that moves the other bytes belongs to one direction of one
  link.
- Sender and Receiver never read a slot's bytes: they pass on what `slot`, `open_slot` and `stage` return.
- Slots are few, long-lived, and known by index.
- `send_data` may be called when the work that fills the tensors is only enqueued, in the stream that is current then.
- `open_slot` is called after a message's header frame was checked and before any byte is needed. `receive_data` is
  called after that: its DATA frame shows that the sender is there.
- Every call has a deadline, but a stuck device may miss it. Any thread may call `shut_down` at any time, through
  Link.end, which frees a stuck thread.
- `send_credit` is called when the consumer has finished with a slot, or has enqueued all its reads in the current
  stream.
"""

from __future__ import annotations

import math
import mmap
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

from bottega.errors import LinkError, TooLarge
from bottega.transport.channel.frames import Frame
from bottega.transport.layout import ALIGNMENT_BYTES, MAX_LAYOUT_BYTES, Layout
from bottega.transport.memory import SealedFile

MAX_SLOTS = 64
MAX_LAYOUTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A time on time.monotonic() until which calls may wait. Several calls may share a deadline."""

    at: float
    """The time in seconds of time.monotonic(). It is finite, because every wait must end."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.at):
            raise ValueError(f"a deadline must be finite; got {self.at}")

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline `seconds` from now. 0 means not to wait at all."""
        return cls(at=time.monotonic() + seconds)

    def left_s(self) -> float:
        """Return the seconds that are left, never below 0."""
        return max(self.at - time.monotonic(), 0.0)

    def sooner(self, seconds: float) -> Deadline:
        """Return this deadline, or the one `seconds` from now if that is earlier."""
        return Deadline(at=min(self.at, time.monotonic() + seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the messages that one end of a link receives: slots x slot_bytes of memory, and as much for files.

    The memory is allocated only as messages need it. Raises ValueError for values out of range.
    """

    slots: int = 2
    """Number of messages that may be on their way or kept at the same time: the sender's credit."""
    slot_bytes: int = 256 << 20
    """Upper bound on the bytes of one message, and of its file."""
    layouts: int = 64
    """Number of layouts that are remembered. Beyond it, the sender drops the least recently used one."""

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"a link has 1 to {MAX_SLOTS} slots, not {self.slots}")
        if not ALIGNMENT_BYTES <= self.slot_bytes <= MAX_LAYOUT_BYTES:
            raise ValueError(f"a slot has {ALIGNMENT_BYTES} to {MAX_LAYOUT_BYTES} bytes, not {self.slot_bytes}")
        if not 1 <= self.layouts <= MAX_LAYOUTS:
            raise ValueError(f"a link remembers 1 to {MAX_LAYOUTS} layouts, not {self.layouts}")

    @property
    def segment_bytes(self) -> int:
        """Size of a slot in whole pages."""
        return -(-self.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Buffer(Protocol):
    """Contiguous memory, flat or shaped: bytes, bytearray, memoryview, mmap, a numpy array."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class DeviceBuffer(Protocol):
    """Flat bytes in device memory. bottega.device_links implements it."""

    @property
    def nbytes(self) -> int: ...

    def to_host(self) -> memoryview:
        """Return a copy in host memory, after waiting for the enqueued work that writes the bytes."""
        ...


Part: TypeAlias = memoryview | DeviceBuffer
"""The bytes of one tensor of a message, in host or device memory. Tensors of a header are always a memoryview."""

SentBuffer: TypeAlias = Buffer | DeviceBuffer
"""A buffer from which a tensor of a message is sent."""


def checked(layout: Layout, buffers: Sequence[SentBuffer]) -> list[Part]:
    """Return the flat bytes of every buffer. Those of a header are copied to the host.

    Raises ValueError if the buffers do not match the layout.
    """
    if len(buffers) != len(layout.specs):
        raise ValueError(f"{len(buffers)} buffers for a layout of {len(layout.specs)} tensors")
    parts = [_flat(buffer) for buffer in buffers]
    for spec, part in zip(layout.specs, parts, strict=True):
        if part.nbytes != spec.size_bytes:
            raise ValueError(f"tensor {spec.name} has {spec.size_bytes} bytes, its buffer {part.nbytes}")
    headers = [part if isinstance(part, memoryview) else part.to_host() for part in parts[: layout.headers]]
    return [*headers, *parts[layout.headers :]]


def on_host(parts: Sequence[Part]) -> list[memoryview]:
    """Return all parts in host memory; those in device memory are copied."""
    return [part if isinstance(part, memoryview) else part.to_host() for part in parts]


def in_host_memory(part: Part) -> memoryview:
    """Return a part as a memoryview. It must be in host memory already.

    Raises ValueError if it is not, because nothing is parsed in device memory.
    """
    if not isinstance(part, memoryview):
        raise ValueError("the header of a message must be in host memory, not in device memory")
    return part


def check_file(file: SealedFile, *, passes: bool, max_bytes: int) -> None:
    """Raise ValueError if the link cannot pass files or the file is empty, and TooLarge if it exceeds `max_bytes`."""
    if not passes:
        raise ValueError("this link cannot pass files: check passes_files first")
    if file.size_bytes < 1:
        raise ValueError("an empty file cannot be passed")
    if file.size_bytes > max_bytes:
        raise TooLarge(
            f"a file of {file.size_bytes} bytes is more than the {max_bytes} that the peer receives",
            metadata={"limit": "slot_bytes"},
        )


def _flat(buffer: SentBuffer) -> Part:
    if isinstance(buffer, (bytes, bytearray, memoryview)):
        return memoryview(buffer).cast("B")
    if hasattr(buffer, "to_host"):
        return buffer  # type: ignore[return-value] # checking a protocol at run time is slow
    return memoryview(buffer).cast("B")


class Backend(StrEnum):
    """A backend of links, the fastest first.

    In this order: a pool of slots in device memory shared within a host, a process group of NCCL or Gloo, shared host
    memory, and TCP.
    """

    CUDA_IPC = "cuda-ipc"
    NCCL = "nccl"
    GLOO = "gloo"
    MEMFD = "memfd"
    TCP = "tcp"

    @property
    def of_devices(self) -> bool:
        """Whether bottega.device_links implements the backend."""
        return self not in {Backend.MEMFD, Backend.TCP}

    @property
    def within_host(self) -> bool:
        """Whether the backend works only between processes on one host, which may share memory."""
        return self in {Backend.CUDA_IPC, Backend.MEMFD}

    @property
    def over_network(self) -> bool:
        """Whether the backend can use TCP connections."""
        return not self.within_host


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """The backend that was chosen for a link, and the reason."""

    backend: Backend
    reason: str


class SentSlot(Protocol):
    """A slot (message buffer) of the sender. Its memory holds one message after another."""

    def views(self, layout: Layout) -> tuple[Part, ...]:
        """Return the memory of each tensor of the layout. The slot must be large enough."""
        ...

    def pieces(self, layout: Layout, start: int, stop: int) -> Sequence[Part]:
        """Return bytes `start` to `stop` - 1 of a message of this layout, in the form that `send_data` takes."""
        ...


class BackendEnd(Protocol):
    """The state that the two ends of a direction share. Only one thread at a time calls these, except `shut_down`."""

    def receive_frame(self, deadline: Deadline) -> Frame | None:
        """Return the peer's next frame with its payload, or None at the deadline.

        It can be called again after None, because a partly received frame is kept. Raises PeerDead at the end of the
        connection, and BadFrame for bytes that are not a frame.
        """
        ...

    def shut_down(self, cause: LinkError) -> None:
        """Send the peer a BYE if that needs almost no waiting, and wake the threads that wait here.

        `receive_frame` then raises PeerDead. Any thread may call this at any time: a monitor ends links whose own
        thread is stuck.
        """
        ...

    def close(self) -> None:
        """Release descriptors and slots, after `shut_down`. Memory that is still referenced stays valid."""
        ...


class SenderBackend(BackendEnd, Protocol):
    """The sender of one direction, implemented by a backend."""

    @property
    def passes_files(self) -> bool:
        """Whether `attach_file` is supported."""
        ...

    def slot(self, index: int, size_bytes: int, deadline: Deadline) -> SentSlot:
        """Return writable memory of at least that size. An index keeps its memory as long as that is large enough.

        Raises NoSharedMemory, and DeadlineExceeded if the receiver could not be told in time.
        """
        ...

    def stage(self, index: int, layout: Layout, parts: Sequence[Part], deadline: Deadline) -> list[Part]:
        """Prepare a whole message from the caller's own memory. Return the parts that `send_data` needs.

        The memory must not change until the slot's credit is back.
        """
        ...

    def attach_file(self, index: int, file: SealedFile, deadline: Deadline) -> None:
        """Attach a file to the slot's next message.

        Raises the errors of `send_frame`, and ValueError if the backend cannot pass files.
        """
        ...

    def send_frame(self, frame: Frame, deadline: Deadline) -> None:
        """Send a frame with its payload. Raises DeadlineExceeded, after which the direction cannot be used."""
        ...

    def send_data(self, frame: Frame, pieces: Sequence[Part], deadline: Deadline) -> None:
        """Send a DATA frame and move the bytes that are ready. Raises the errors of `send_frame`."""
        ...


class ReceiverBackend(BackendEnd, Protocol):
    """The receiver of one direction, implemented by a backend."""

    def open_slot(self, index: int, layout: Layout) -> tuple[Part, ...]:
        """Return the memory of each tensor of this slot's message. Called once per message, before any byte moves."""
        ...

    def pop_file(self, index: int) -> memoryview | None:
        """Return the bytes of the file of the message in this slot, or None if it has none.

        Called once per message, after `open_slot`.
        """
        ...

    def receive_data(self, index: int, start: int, stop: int, deadline: Deadline) -> int:
        """Receive the slot's bytes `start` to `stop` - 1 until the deadline; return how many arrived."""
        ...

    def send_credit(self, frame: Frame) -> None:
        """Send a CREDIT frame without waiting. Any thread may call it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEndpoint:
    """The device in whose memory one end of a link sends and receives messages."""

    host: str
    """Identity of the running system; "" if unknown."""
    device: str
    """Identity of the device, the same in all processes."""
    version: str
    """Version of the software that moves bytes. It must be the same at both ends."""
    backends: tuple[Backend, ...]
    """Backends that this end supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenConnections:
    """The connections of a link that is being opened, one for each direction. Both ends have proved themselves."""

    sending: socket.socket
    receiving: socket.socket
    connecting: bool
    """Whether this process connected. Otherwise it listened."""
    limits: Limits
    """Limits on the messages that this process receives."""


class DeviceLinks(Protocol):
    """The device of a process, as its links see it."""

    @property
    def endpoint(self) -> DeviceEndpoint:
        """The description of the device for offers."""
        ...

    def misfit(self, backend: Backend, listener: DeviceEndpoint) -> str:
        """Return why a backend cannot be used for a link to a listener, or "". Does not wait."""
        ...

    def open(
        self, backend: Backend, connections: ProvenConnections, deadline: Deadline
    ) -> tuple[SenderBackend, ReceiverBackend]:
        """Set up both directions, while the other end does the same.

        Raises LinkError with the reason; the connections are closed then.
        """
        ...

    def remember_failure(self, backend: Backend, listener: DeviceEndpoint, why: str) -> None:
        """Remember that a link to the listener failed. `misfit` reports it for a while."""
        ...
