"""Cuts the tensors of a section into pieces, in the order in which they are sent, and packs pieces into chunks.

Other messages can be sent between chunks, so that even a slow connection can transfer large sections. A chunk has bytes
of as many consecutive tensors as fit; its header says where the first of them begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bottega.addons.edits.wire import messages
from bottega.addons.edits.wire.section import SectionLayout
from bottega.transport import Deadline, Link
from bottega.v1.trace_pb2 import StoreTimes

# A chunk that is not accepted in this time never will be.
_SEND_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionPiece:
    """A range of bytes of one tensor of a section."""

    tensor: int
    """Index of the tensor in the section."""
    start: int
    """Offset of the first byte in the tensor."""
    size_bytes: int


class SectionPieces:
    """The pieces of a section that remain to be sent. Raises ValueError for tensors that the section does not have.

    Args:
        tensors: Indices of the tensors to send, in order; None for all.
    """

    def __init__(self, layout: SectionLayout, tensors: Iterable[int] | None = None) -> None:
        self._layout = layout
        places = range(len(layout.tensors)) if tensors is None else tuple(dict.fromkeys(tensors))
        if any(not 0 <= place < len(layout.tensors) for place in places):
            raise ValueError(f"tensors of the section must be numbered 0 to {len(layout.tensors) - 1}")
        self._left = deque(places)
        self._taken_bytes = 0  # of the first tensor that is left

    @property
    def done(self) -> bool:
        return not self._left

    @property
    def first(self) -> tuple[int, int]:
        """Index of the next tensor to send, and offset of the next byte in it. Raises IndexError if nothing is left."""
        return self._left[0], self._taken_bytes

    def take(self, max_bytes: int) -> list[SectionPiece]:
        """Return and remove the next pieces, with at most `max_bytes` in total."""
        pieces = []
        while self._left and max_bytes:
            place = self._left[0]
            whole_bytes = self._layout.tensors[place].size_bytes
            size_bytes = min(max_bytes, whole_bytes - self._taken_bytes)
            pieces.append(SectionPiece(tensor=place, start=self._taken_bytes, size_bytes=size_bytes))
            max_bytes -= size_bytes
            self._taken_bytes += size_bytes
            if self._taken_bytes == whole_bytes:
                self._left.popleft()
                self._taken_bytes = 0
        return pieces


def send_chunk(
    link: Link,
    number: int,
    pieces: Sequence[SectionPiece],
    fill: Callable[[SectionPiece, memoryview], None],
    *,
    times: StoreTimes | None = None,
) -> int:
    """Send pieces in one message; return their total size in bytes.

    Raises the errors of sending and of `fill`. If `fill` fails, nothing was sent.

    Args:
        fill: Writes the bytes of a piece into the message.
        times: See `chunk_header`.
    """
    size_bytes = sum(piece.size_bytes for piece in pieces)
    with link.start_message(messages.chunk_layout(size_bytes), Deadline.after(_SEND_S)) as outgoing:
        head = messages.chunk_header(number, tensor=pieces[0].tensor, start=pieces[0].start, times=times)
        for view, encoded in zip(outgoing.views, head, strict=False):
            view[:] = encoded
        view = outgoing.views[-1]
        for piece in pieces:
            fill(piece, view[: piece.size_bytes])
            view = view[piece.size_bytes :]
        outgoing.finish()
    return size_bytes


class SectionChunks:
    """Sends a whole section from memory, in chunks.

    Args:
        number: Number of the messages.
        tensors: The bytes of the section's tensors.
    """

    def __init__(self, number: int, layout: SectionLayout, tensors: Sequence[bytes | memoryview]) -> None:
        self._number = number
        self._tensors = [memoryview(tensor).cast("B") for tensor in tensors]
        self._pieces = SectionPieces(layout)
        if [len(data) for data in self._tensors] != [tensor.size_bytes for tensor in layout.tensors]:
            raise ValueError("the sizes of a section's tensors do not match its layout")

    @property
    def done(self) -> bool:
        return self._pieces.done

    def send(self, link: Link, max_bytes: int) -> int:
        """Send the next chunk, with at most `max_bytes`; return its size in bytes."""
        return send_chunk(link, self._number, self._pieces.take(max_bytes), self._fill)

    def _fill(self, piece: SectionPiece, view: memoryview) -> None:
        view[:] = self._tensors[piece.tensor][piece.start : piece.start + piece.size_bytes]
