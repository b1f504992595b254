"""Links within one process: notices go through two queues, and what was sent is looked at where it lies.

A sender's own buffers are handed over by reference, unless they are read-only; slots are for those who write in place.
A file is mapped as between processes. It knows no message.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from bottega.errors import DeadlineExceeded, LinkError, PeerDead
from bottega.transport.channel.frames import Frame, bye
from bottega.transport.deadline import Deadline
from bottega.transport.layout import Layout
from bottega.transport.memory.copying import copy
from bottega.transport.memory.sealed_file import SealedFile, received_file
from bottega.transport.memory.slots import PrivateSlots, Slot

# Of notices that nobody has read. Credit bounds messages, and nothing else bounds registrations.
_UNREAD = 1024
_NOW = Deadline(at=0.0)


class _Queue:
    """Notices from one end to the other."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._changed = threading.Condition()
        self._ended = False

    def put(self, frame: Frame, deadline: Deadline) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._frames) < _UNREAD or self._ended, deadline.left_s())
            if self._ended:
                raise _gone()
            if len(self._frames) >= _UNREAD:
                raise DeadlineExceeded("the receiver reads nothing")
            self._frames.append(frame)
            self._changed.notify_all()

    def get(self, deadline: Deadline) -> Frame | None:
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._ended, deadline.left_s())
            if self._frames:
                self._changed.notify_all()
                return self._frames.popleft()
            if self._ended:
                raise _gone()
            return None

    def end(self, last: Frame) -> None:
        with self._changed:
            if not self._ended:
                self._frames.append(last)
                self._ended = True
            self._changed.notify_all()


class LocalDirection:
    """What both ends of a direction share."""

    def __init__(self) -> None:
        self.forth = _Queue()
        self.back = _Queue()
        self.slots = PrivateSlots()
        # By slot, where the message in it lies in buffers of the sender's own.
        self.handed_over: dict[int, tuple[memoryview, ...]] = {}
        # By slot, of its next message.
        self.files: dict[int, memoryview] = {}

    def end(self, cause: LinkError) -> None:
        """Ends both queues; what is in them can still be read."""
        self.forth.end(bye(cause))
        self.back.end(bye(cause))


class LocalSender:
    """The sender's end."""

    passes_files = True

    def __init__(self, direction: LocalDirection) -> None:
        self._direction = direction

    def hear(self, deadline: Deadline) -> Frame | None:
        return self._direction.back.get(deadline)

    def slot(self, index: int, size_bytes: int, deadline: Deadline) -> Slot:
        self._direction.handed_over.pop(index, None)
        return self._direction.slots.get(index, size_bytes)

    def stage(self, index: int, layout: Layout, buffers: Sequence[memoryview], deadline: Deadline) -> list[memoryview]:
        if any(buffer.readonly for buffer in buffers):
            # torch warns of memory that cannot be written: only what can be is handed over.
            slot = self.slot(index, layout.size_bytes, deadline)
            for target, source in zip(slot.views(layout), buffers, strict=True):
                copy(target, source)
        else:
            self._direction.handed_over[index] = tuple(buffers)
        return []

    def attach(self, index: int, file: SealedFile, deadline: Deadline) -> None:
        self._direction.files[index] = received_file(file.descriptor, file.size_bytes)

    def tell(self, frame: Frame, deadline: Deadline) -> None:
        self._direction.forth.put(frame, deadline)

    def move(self, frame: Frame, pieces: Sequence[memoryview], deadline: Deadline) -> None:
        self._direction.forth.put(frame, deadline)

    def shut(self, cause: LinkError) -> None:
        self._direction.end(cause)

    def close(self) -> None:
        """Nothing: what was sent before the close may still be received, from the slots that both ends share."""


class LocalReceiver:
    """The receiver's end."""

    def __init__(self, direction: LocalDirection) -> None:
        self._direction = direction

    def hear(self, deadline: Deadline) -> Frame | None:
        return self._direction.forth.get(deadline)

    def open(self, index: int, layout: Layout) -> tuple[memoryview, ...]:
        handed_over = self._direction.handed_over.get(index)
        return handed_over or self._direction.slots.get(index, layout.size_bytes).views(layout)

    def file(self, index: int) -> memoryview | None:
        return self._direction.files.pop(index, None)

    def fill(self, index: int, start: int, stop: int, deadline: Deadline) -> int:
        return stop - start  # they are there

    def grant(self, frame: Frame) -> None:
        self._direction.handed_over.pop(frame.slot, None)
        self._direction.back.put(frame, _NOW)

    def shut(self, cause: LinkError) -> None:
        self._direction.end(cause)

    def close(self) -> None:
        self._direction.slots.clear()
        self._direction.handed_over.clear()
        self._direction.files.clear()


def _gone() -> PeerDead:
    return PeerDead("the other end of the link is gone")
