"""The receiving half of a link: it receives messages tensor by tensor, checks the peer's frames, and gives credit.

Every number on which a check depends is read once, from a copy, because the peer can still write shared memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from types import TracebackType

from bottega.errors import BadFrame, DeadlineExceeded, LayoutMismatch, LeaseExpired, LinkError, MessageAborted
from bottega.transport.channel.backend import Deadline, Limits, Part, ReceiverBackend, in_host_memory
from bottega.transport.channel.counters import Lifecycle, LinkCounters
from bottega.transport.channel.frames import Frame, FrameKind, cause_of_bye
from bottega.transport.layout import Layout, TensorSpec


class Receiver:
    """The receiver of one direction (see Link). One thread at a time uses it; any may call `release` and `close`."""

    def __init__(
        self, backend: ReceiverBackend, limits: Limits, lifecycle: Lifecycle, counters: LinkCounters, lease_s: float
    ) -> None:
        self.lock = threading.RLock()
        self._backend = backend
        self._limits = limits
        self.lifecycle = lifecycle
        self._counters = counters
        self._lease_s = lease_s
        self._layouts: dict[int, Layout] = {}
        self._started: deque[Incoming] = deque()
        self._current: Incoming | None = None
        # Slots whose message is not released yet. They have their own lock, so that a release never waits for a
        # receive.
        self._held: set[int] = set()
        self._giving = threading.Lock()
        self._sequence = 0

    def recv(self, deadline: Deadline, expected: Layout | None) -> Incoming:
        with self.lock:
            while not self._started:
                self.lifecycle.check()
                if not self.pump(deadline):
                    raise DeadlineExceeded("no message came in time; the peer may be slow, stopped or idle")
            incoming = self._started.popleft()
            if expected is not None and incoming.layout.digest != expected.digest:
                self.lifecycle.fail(LayoutMismatch(_difference(expected, incoming.layout)))
            return incoming

    def wait(self, incoming: Incoming, count: int, deadline: Deadline) -> None:
        """Wait until the message's first `count` tensors have arrived."""
        with self.lock:
            while incoming.arrived < count:
                if incoming.aborted:
                    raise MessageAborted("the sender aborted the message; discard the part that was received")
                self.lifecycle.check()
                if not self.pump(deadline):
                    raise DeadlineExceeded(
                        f"{incoming.arrived} of {count} tensors came in time; the peer may be slow or stopped"
                    )

    def pump(self, deadline: Deadline) -> bool:
        """Process one frame, or some more bytes of the last one. Return False if nothing arrived in time."""
        try:
            if self._current is not None and self._current.awaited:
                return self._fill(self._current, deadline)
            frame = self._backend.receive_frame(deadline)
            if frame is None:
                return False
            self._process(frame)
        except LinkError as error:
            self.lifecycle.fail(error)
        return True

    def release(self, incoming: Incoming) -> None:
        """Free the slot now, or when the sender has sent the rest of the message."""
        with self._giving:
            if incoming.index not in self._held or incoming.released:
                return
            incoming.released = True
            if incoming.ended:
                self._grant(incoming)

    def check_lease(self) -> None:
        """Raise LeaseExpired if the link ended longer ago than messages may be kept."""
        if self.lifecycle.dead_for_s() > self._lease_s:
            raise LeaseExpired(f"the link ended more than {self._lease_s:g} s ago; its messages are no longer valid")

    def close(self) -> None:
        """Release memory and descriptors, after the end of the link."""
        with self.lock, self._giving:
            self._started.clear()
            self._current = None
            self._backend.close()

    def _process(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.DATA:
                self._data(frame)
            case FrameKind.LAYOUT:
                self._register(frame)
            case FrameKind.BYE:
                raise cause_of_bye(frame)
            case _:
                raise BadFrame("the sender sent a frame that only receivers send")

    def _register(self, frame: Frame) -> None:
        if frame.layout >= self._limits.layouts:
            raise BadFrame(f"the sender registers layout {frame.layout}; {self._limits.layouts} are remembered")
        try:
            layout = Layout.decode(frame.payload)
        except ValueError as error:
            raise BadFrame(f"the sender registers an invalid layout: {error}") from error
        if layout.size_bytes > self._limits.slot_bytes:
            raise BadFrame(f"the sender registers a layout of {layout.size_bytes} bytes, more than a slot has")
        self._layouts[frame.layout] = layout

    def _data(self, frame: Frame) -> None:
        current = self._current
        if current is None:
            current = self._start(frame)
        elif (frame.sequence, frame.slot) != (current.sequence, current.index):
            raise BadFrame("the sender began a message in the middle of another")
        if frame.flag:
            current.aborted = True
            self._counters.aborted()
            self._end(current)
            return
        if not current.arrived < frame.ready <= len(current.layout.specs):
            raise BadFrame(f"the sender announces {frame.ready} tensors of {len(current.layout.specs)}")
        start, stop = current.layout.span(current.arrived, frame.ready)
        if frame.size != stop - start:
            raise BadFrame(f"the sender announces {frame.size} bytes for tensors of {stop - start} bytes")
        # The next pump receives the bytes, because `recv` checks a new message's layout before its first byte moves.
        current.awaited = frame.ready
        current.filled, current.stop = start, stop

    def _start(self, frame: Frame) -> Incoming:
        layout = self._layouts.get(frame.layout)
        if layout is None:
            raise BadFrame(f"the sender sent a message of layout {frame.layout}, which it never registered")
        self._sequence += 1
        with self._giving:
            if frame.slot >= self._limits.slots or frame.slot in self._held or frame.sequence != self._sequence:
                raise BadFrame("the sender sent a message without a credit for it")
            self._held.add(frame.slot)
        parts = self._backend.open_slot(frame.slot, layout)
        current = self._current = Incoming(self, layout, parts, frame.slot, frame.sequence)
        current.file = self._backend.pop_file(frame.slot)
        current.file_bytes = 0 if current.file is None else len(current.file)
        self._started.append(current)
        return current

    def _fill(self, current: Incoming, deadline: Deadline) -> bool:
        got = self._backend.receive_data(current.index, current.filled, current.stop, deadline)
        current.filled += got
        if current.filled == current.stop:
            current.arrived, current.awaited = current.awaited, 0
            if current.arrived == len(current.layout.specs):
                took_s = time.monotonic() - current.began
                self._counters.received(current.layout.size_bytes, took_s, file_bytes=current.file_bytes)
                self._end(current)
        return got > 0

    def _end(self, current: Incoming) -> None:
        """Record that the message is complete or aborted."""
        self._current = None
        with self._giving:
            current.ended = True
            if current.released:
                self._grant(current)

    def _grant(self, incoming: Incoming) -> None:
        self._held.discard(incoming.index)
        if self.lifecycle.cause is not None:
            return
        try:
            self._backend.send_credit(Frame(FrameKind.CREDIT, slot=incoming.index, sequence=incoming.sequence))
        except LinkError as error:
            # Not raised here: the caller has finished with the message. The next call on the link raises it.
            self.lifecycle.end(error)


class Incoming:
    """A message that is arriving or has arrived. Use it as a context manager, which releases it.

    Until then, any thread may use the parts that have arrived. Their memory stays valid as long as something refers to
    it, but after `release` the next message may overwrite it. If a wait raises, the message will never be complete:
    discard everything that was computed from its first tensors.

    `file` holds the read-only bytes of the file that came with the message, complete from the beginning. It is None
    without a file and after `release`. The bytes may be kept longer, and nothing ever writes to them.
    """

    __slots__ = (
        "_lifecycle",
        "_parts",
        "_receiver",
        "aborted",
        "arrived",
        "awaited",
        "began",
        "ended",
        "file",
        "file_bytes",
        "filled",
        "index",
        "layout",
        "released",
        "sequence",
        "stop",
    )

    def __init__(self, receiver: Receiver, layout: Layout, parts: tuple[Part, ...], index: int, sequence: int) -> None:
        self._receiver = receiver
        self._lifecycle = receiver.lifecycle
        self._parts = parts
        self.layout = layout
        self.index = index
        self.sequence = sequence
        self.arrived = 0  # number of tensors
        self.awaited = 0  # number of tensors that the last frame announced, until they have arrived
        self.filled = self.stop = 0  # byte offsets in the slot: received up to, and announced up to
        self.ended = self.aborted = self.released = False
        self.file: memoryview | None = None
        self.file_bytes = 0
        self.began = time.monotonic()

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def wait(self, count: int, deadline: Deadline) -> None:
        """Wait until the first `count` tensors have arrived. Only the receiver's thread may call it.

        Raises DeadlineExceeded, after which waiting again is possible; MessageAborted; or the cause of the link's end.
        """
        if count > len(self.layout.specs):
            raise ValueError(f"cannot wait for {count} tensors: the message has {len(self.layout.specs)}")
        if self.arrived < count:
            self._receiver.wait(self, count, deadline)

    def wait_all(self, deadline: Deadline) -> None:
        """Wait until the message is complete. Raises the errors of `wait`."""
        self.wait(len(self.layout.specs), deadline)

    def view(self, index: int) -> memoryview:
        """Return the read-only bytes of one tensor in host memory.

        Python treats them as writable, so that torch.frombuffer does not warn, but they are not. Between processes a
        write ends this process with SIGSEGV; within one process it changes the sender's data.

        Raises the errors of `part`, and ValueError if the bytes are in device memory.
        """
        return in_host_memory(self.part(index))

    def part(self, index: int) -> Part:
        """Return the read-only bytes of one tensor, in host or device memory.

        Raises IndexError if the tensor has not arrived, and LeaseExpired if the message was released or its link ended
        longer ago than its lease_s.
        """
        # Read first: a thread that releases the message meanwhile sets `released` before it drops the parts.
        parts = self._parts
        if self._lifecycle.cause is not None:
            self._receiver.check_lease()
        if self.released:
            raise LeaseExpired("the message was released; copy data that is needed longer before releasing it")
        if not 0 <= index < self.arrived:
            raise IndexError(f"tensor {index} has not arrived: wait for {index + 1} first")
        return parts[index]

    def release(self) -> None:
        """Release the message. The sender gets its credit back once it has sent all of the message.

        Any thread may call it, more than once.
        """
        self._receiver.release(self)
        self._parts = ()
        self.file = None


def _difference(expected: Layout, got: Layout) -> str:
    for want, have in zip(expected.specs, got.specs, strict=False):
        if want != have:
            return f"the message has {_named(have)} where {_named(want)} is expected"
    return f"the message has {len(got.specs)} tensors where {len(expected.specs)} are expected"


def _named(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype.name.lower()}{list(spec.shape)}"
