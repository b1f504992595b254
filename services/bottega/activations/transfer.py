"""A section on its way to a worker of another host: its tensors in the order of their use, in pieces between which
others may speak. Reads the file straight into the link's slots.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass

from bottega.caching import CacheLease
from bottega.errors import InternalError, InvalidRequest
from bottega.sections import messages
from bottega.sections.section import SectionLayout
from bottega.transport import Deadline, Link

# A message that is not taken in this time never will be.
_SEND_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SectionRequested:
    """What a worker asked for. number: as it calls it. tensors: places of them in the section, empty is all. order: its
    place among all that the worker has asked for. edit: see SectionRequest."""

    number: int
    digest: str
    tensors: tuple[int, ...]
    edit: int
    order: int


class SectionTransfer:
    """A lease that is being sent. layout: of the section. Raises InvalidRequest for tensors that it does not have."""

    def __init__(self, requested: SectionRequested, lease: CacheLease, layout: SectionLayout) -> None:
        self.number = requested.number
        self.edit = requested.edit
        self.order = requested.order
        self.lease = lease
        self._layout = layout
        count = len(layout.tensors)
        if any(not 0 <= place < count for place in requested.tensors):
            raise InvalidRequest(f"the section has the tensors 0 to {count - 1}")
        self._left = deque(dict.fromkeys(requested.tensors or range(count)))
        self._sent_bytes = 0  # of the first of those

    @property
    def done(self) -> bool:
        """Whether all was sent that was asked for."""
        return not self._left

    def send_piece(self, link: Link, most_bytes: int) -> int:
        """Sends the next bytes, of as many tensors as they are; returns how many. Raises InternalError where the file
        has become shorter, and what sending does."""
        first, start = self._left[0], self._sent_bytes
        pieces = self._next_pieces(most_bytes)
        size_bytes = sum(length for _, length in pieces)
        with link.start_message(messages.chunk_layout(size_bytes), Deadline.after(_SEND_S)) as outgoing:
            head = messages.chunk_header(self.number, tensor=first, start=start)
            for view, said in zip(outgoing.views, head, strict=False):
                view[:] = said
            view = outgoing.views[-1]
            for place, length in pieces:
                self._fill(view[:length], place)
                view = view[length:]
            outgoing.finish()
        return size_bytes

    def _next_pieces(self, most_bytes: int) -> list[tuple[int, int]]:
        """Takes so many of the bytes that are left: where they lie in the file, and how many."""
        pieces = []
        while self._left and most_bytes:
            offset, whole_bytes = self._layout.place(self._layout.tensors[self._left[0]].name)
            length = min(most_bytes, whole_bytes - self._sent_bytes)
            pieces.append((offset + self._sent_bytes, length))
            most_bytes -= length
            self._sent_bytes += length
            if self._sent_bytes == whole_bytes:
                self._left.popleft()
                self._sent_bytes = 0
        return pieces

    def _fill(self, view: memoryview, place: int) -> None:
        """Reads bytes of the file into a tensor of a slot."""
        done = 0
        while done < len(view):
            got = os.preadv(self.lease.descriptor, [view[done:]], place + done)
            if not got:
                raise InternalError("a section's file has become shorter while it was sent")
            done += got
