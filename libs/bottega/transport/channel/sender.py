"""The sending half of a link. It sends a message, whole or in pieces, when the receiver has a free slot for it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import ParamSpec

from bottega.errors import BadFrame, DeadlineExceeded, LinkError, NoCredit, NoSharedMemory, TooLarge
from bottega.transport.channel.backend import (
    Deadline,
    Limits,
    SenderBackend,
    SentBuffer,
    SentSlot,
    check_file,
    checked,
    in_host_memory,
)
from bottega.transport.channel.counters import Lifecycle, LinkCounters
from bottega.transport.channel.frames import Frame, FrameKind, cause_of_bye
from bottega.transport.layout import Layout
from bottega.transport.memory import SealedFile

_NOW = Deadline(at=0.0)
_ABORTED = 1
_Arguments = ParamSpec("_Arguments")


class Sender:
    """The sender of one direction (see Link). One thread at a time uses it; any thread may call `close`."""

    def __init__(self, backend: SenderBackend, limits: Limits, lifecycle: Lifecycle, counters: LinkCounters) -> None:
        self.lock = threading.RLock()
        self._backend = backend
        self._limits = limits
        self._lifecycle = lifecycle
        self._counters = counters
        self._free = deque(range(limits.slots))
        # Number of the message that is in each slot.
        self._under_way: dict[int, int] = {}
        self._layouts: OrderedDict[bytes, int] = OrderedDict()
        self._sequence = 0
        self._open: Outgoing | None = None

    def prepare(self, layout: Layout, deadline: Deadline) -> None:
        with self.lock:
            self._register(layout, deadline)
            for index in self._free:
                self._slot(index, layout, deadline)

    def start_message(self, layout: Layout, deadline: Deadline) -> Outgoing:
        with self.lock:
            index, number = self._admit(layout, deadline)
            try:
                slot = self._slot(index, layout, deadline)
            except NoSharedMemory:
                self._undo_admit(index)
                raise
            outgoing = self._open = Outgoing(self, layout, slot, number=number, index=index, deadline=deadline)
            return outgoing

    @property
    def passes_files(self) -> bool:
        return self._backend.passes_files

    def send(
        self, layout: Layout, buffers: Sequence[SentBuffer], deadline: Deadline, file: SealedFile | None = None
    ) -> None:
        parts = checked(layout, buffers)
        if file is not None:
            check_file(file, passes=self.passes_files, max_bytes=self._limits.slot_bytes)
        with self.lock:
            index, number = self._admit(layout, deadline)
            began = time.monotonic()
            try:
                staged = self._backend.stage(index, layout, parts, deadline)
            except NoSharedMemory:
                self._undo_admit(index)
                raise
            except LinkError as error:
                self._lifecycle.fail(error)
            if file is not None:
                self._send(self._backend.attach_file, index, file, deadline)
            count = len(layout.specs)
            self._send(
                self._backend.send_data, self._data(index, number, count, layout.span(0, count)), staged, deadline
            )
            file_bytes = 0 if file is None else file.size_bytes
            self._counters.sent(layout.size_bytes, time.monotonic() - began, file_bytes=file_bytes)

    def drain(self, deadline: Deadline) -> None:
        with self.lock:
            while self._under_way:
                self._lifecycle.check()
                if not self._receive_frame(deadline):
                    raise DeadlineExceeded(f"the receiver still holds {len(self._under_way)} messages")

    def publish(self, outgoing: Outgoing, count: int) -> None:
        """Send the first `count` tensors of an open message, as far as they are not sent yet."""
        with self.lock:
            self._lifecycle.check()
            layout, index = outgoing.layout, outgoing.index
            start, stop = layout.span(outgoing.published, count)
            frame = self._data(index, outgoing.number, count, (start, stop))
            self._send(self._backend.send_data, frame, outgoing.slot.pieces(layout, start, stop), outgoing.deadline)
            if count == len(layout.specs):
                self._open = None
                self._counters.sent(layout.size_bytes, time.monotonic() - outgoing.began)

    def abort(self, outgoing: Outgoing) -> None:
        """Abort an open message. Its slot is free at once, or when the receiver has released it."""
        with self.lock:
            if self._open is not outgoing:
                return
            self._open = None
            self._counters.aborted()
            if self._lifecycle.cause is not None:
                return
            if outgoing.published == 0:
                self._undo_admit(outgoing.index)
                return
            frame = Frame(
                FrameKind.DATA, flag=_ABORTED, slot=outgoing.index, layout=outgoing.number, sequence=self._sequence
            )
            self._send(self._backend.send_data, frame, [], outgoing.deadline)

    def close(self) -> None:
        """Release memory and descriptors, after the end of the link."""
        with self.lock:
            self._backend.close()

    def _admit(self, layout: Layout, deadline: Deadline) -> tuple[int, int]:
        """Return a free slot for the next message, and the number of the layout."""
        self._lifecycle.check()
        if self._open is not None:
            raise RuntimeError("one message at a time: finish or abort the last one first")
        number = self._register(layout, deadline)
        index = self._credit(deadline)
        self._sequence += 1
        self._under_way[index] = self._sequence
        return index, number

    def _undo_admit(self, index: int) -> None:
        """Free the slot of a message of which nothing was sent."""
        self._sequence -= 1
        del self._under_way[index]
        self._free.append(index)

    def _register(self, layout: Layout, deadline: Deadline) -> int:
        """Return the number of the layout on this link. Register the layout first if it is new."""
        self._lifecycle.check()
        number = self._layouts.get(layout.digest)
        if number is not None:
            self._layouts.move_to_end(layout.digest)
            return number
        if layout.size_bytes > self._limits.slot_bytes:
            raise TooLarge(
                f"a message of {layout.size_bytes} bytes does not fit into the link's slots of "
                f"{self._limits.slot_bytes} bytes: raise slot_bytes at both ends, or send less at once",
                metadata={"limit": "slot_bytes"},
            )
        full = len(self._layouts) >= self._limits.layouts
        number = self._layouts.popitem(last=False)[1] if full else len(self._layouts)
        encoded = layout.encode()
        self._send(
            self._backend.send_frame,
            Frame(FrameKind.LAYOUT, layout=number, size=len(encoded), payload=encoded),
            deadline,
        )
        self._layouts[layout.digest] = number
        return number

    def _credit(self, deadline: Deadline) -> int:
        """Wait for a free slot and return its index. Raises the cause of the link's end."""
        while self._receive_frame(_NOW):
            pass
        if not self._free:
            self._wait_for_credit(deadline)
        return self._free.popleft()

    def _wait_for_credit(self, deadline: Deadline) -> None:
        began = time.monotonic()
        while not self._free:
            if not self._receive_frame(deadline):
                waited_s = time.monotonic() - began
                self._counters.waited(waited_s, in_vain=True)
                raise NoCredit(
                    f"the receiver held all {self._limits.slots} slots of the link for {waited_s:.3f} s; "
                    "it is slow, stopped, or does not release what it has received"
                )
        self._counters.waited(time.monotonic() - began, in_vain=False)

    def _receive_frame(self, deadline: Deadline) -> bool:
        """Process one frame of the receiver. Return False if none arrived before the deadline."""
        try:
            frame = self._backend.receive_frame(deadline)
            if frame is None:
                return False
            self._process(frame)
        except LinkError as error:
            self._lifecycle.fail(error)
        return True

    def _process(self, frame: Frame) -> None:
        if frame.kind == FrameKind.BYE:
            raise cause_of_bye(frame)
        if frame.kind != FrameKind.CREDIT or self._under_way.get(frame.slot) != frame.sequence:
            raise BadFrame("the receiver gave credit for a message that was not under way")
        del self._under_way[frame.slot]
        self._free.append(frame.slot)

    def _slot(self, index: int, layout: Layout, deadline: Deadline) -> SentSlot:
        try:
            return self._backend.slot(index, layout.size_bytes, deadline)
        except NoSharedMemory:
            raise
        except LinkError as error:
            self._lifecycle.fail(error)

    def _data(self, index: int, number: int, count: int, span: tuple[int, int]) -> Frame:
        size = span[1] - span[0]
        return Frame(FrameKind.DATA, slot=index, ready=count, layout=number, sequence=self._sequence, size=size)

    def _send(self, send: Callable[_Arguments, None], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        """Call a method of the backend. An error ends the link."""
        try:
            send(*args, **kwargs)
        except LinkError as error:
            self._fail(error)

    def _fail(self, error: LinkError) -> None:
        """End the link. If the peer sent a BYE before it disconnected, that is the cause."""
        if not isinstance(error, DeadlineExceeded):
            while self._receive_frame(_NOW):
                pass
        self._lifecycle.fail(error)


class Outgoing:
    """A message that is written in place. Use it as a context manager, which aborts an unfinished message.

    `parts` is the memory, on the host or a device, into which each tensor is written. Do not write a part after it was
    declared ready. On a device, the writes only need to be enqueued in the current stream. `deadline` comes from
    `start_message` and applies to the whole message.
    """

    __slots__ = ("_sender", "began", "deadline", "index", "layout", "number", "parts", "published", "slot")

    def __init__(
        self, sender: Sender, layout: Layout, slot: SentSlot, *, number: int, index: int, deadline: Deadline
    ) -> None:
        self._sender = sender
        self.layout = layout
        self.number = number
        self.index = index
        self.slot = slot
        self.deadline = deadline
        self.parts = slot.views(layout)
        self.published = 0
        self.began = time.monotonic()

    def __enter__(self) -> Outgoing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()

    @property
    def views(self) -> tuple[memoryview, ...]:
        """The parts as memoryviews. Raises ValueError if one is not in host memory."""
        return tuple(in_host_memory(part) for part in self.parts)

    def extend(self, deadline: Deadline) -> None:
        """Replace the deadline, for a message whose tensors are computed while it is sent."""
        self.deadline = deadline

    def ready(self, count: int) -> None:
        """Declare the first `count` tensors complete and send them.

        Raises DeadlineExceeded if they could not be sent in time. The link ends then, because half a message cannot be
        aborted. Raises the cause of the link's end.
        """
        if not self.published <= count <= len(self.layout.specs):
            raise ValueError(f"{count} tensors cannot be ready: {self.published} were, of {len(self.layout.specs)}")
        if count > self.published:
            self._sender.publish(self, count)
            self.published = count

    def finish(self) -> None:
        """Declare all tensors complete. Raises the errors of `ready`."""
        self.ready(len(self.layout.specs))

    def abort(self) -> None:
        """Abort the message unless it is finished. The receiver's waits raise MessageAborted."""
        self._sender.abort(self)
