"""A section's tensors cut into pieces, in the order in which they travel, and the messages that carry them.

What is large goes in chunks between which others may speak, so that a slow link carries any section. A chunk has bytes
of as many tensors as it has room for, one behind the other; its header says where the first of them begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bottega.sections import messages
from bottega.sections.section import SectionLayout
from bottega.transport import Deadline, Link
from bottega.v1.trace_pb2 import StoreTimes

# A chunk that is not taken in this time never will be.
_SEND_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionPiece:
    """Bytes of one tensor. tensor: its place in the section. start: the first of the bytes, in the tensor."""

    tensor: int
    start: int
    size_bytes: int


class SectionPieces:
    """What is left of a section. tensors: places of those that travel, in their order; None is all.

    Raises ValueError for tensors that the section does not have.
    """

    def __init__(self, layout: SectionLayout, tensors: Iterable[int] | None = None) -> None:
        self._layout = layout
        places = range(len(layout.tensors)) if tensors is None else tuple(dict.fromkeys(tensors))
        if any(not 0 <= place < len(layout.tensors) for place in places):
            raise ValueError(f"the section has the tensors 0 to {len(layout.tensors) - 1}")
        self._left = deque(places)
        self._taken_bytes = 0  # of the first of those

    @property
    def done(self) -> bool:
        """Whether nothing is left."""
        return not self._left

    @property
    def first(self) -> tuple[int, int]:
        """Where the rest begins: the place of a tensor, and a byte in it. Raises IndexError where nothing is left."""
        return self._left[0], self._taken_bytes

    def take(self, most_bytes: int) -> list[SectionPiece]:
        """The next ones, so many bytes of them, or all that is left."""
        pieces = []
        while self._left and most_bytes:
            place = self._left[0]
            whole_bytes = self._layout.tensors[place].size_bytes
            size_bytes = min(most_bytes, whole_bytes - self._taken_bytes)
            pieces.append(SectionPiece(tensor=place, start=self._taken_bytes, size_bytes=size_bytes))
            most_bytes -= size_bytes
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
    """Sends them in one message; returns their bytes. fill: writes the bytes of a piece into a slot. times: see
    `chunk_header`.

    Raises what sending does, and what `fill` does; nothing of it was sent then.
    """
    size_bytes = sum(piece.size_bytes for piece in pieces)
    with link.start_message(messages.chunk_layout(size_bytes), Deadline.after(_SEND_S)) as outgoing:
        head = messages.chunk_header(number, tensor=pieces[0].tensor, start=pieces[0].start, times=times)
        for view, said in zip(outgoing.views, head, strict=False):
            view[:] = said
        view = outgoing.views[-1]
        for piece in pieces:
            fill(piece, view[: piece.size_bytes])
            view = view[piece.size_bytes :]
        outgoing.finish()
    return size_bytes


class SectionChunks:
    """All tensors of a section, on their way out of memory. number: of their messages. tensors: their elements."""

    def __init__(self, number: int, layout: SectionLayout, tensors: Sequence[bytes | memoryview]) -> None:
        self._number = number
        self._tensors = [memoryview(tensor).cast("B") for tensor in tensors]
        self._pieces = SectionPieces(layout)
        if [len(each) for each in self._tensors] != [tensor.size_bytes for tensor in layout.tensors]:
            raise ValueError("a section has other bytes than its tensors' shapes say")

    @property
    def done(self) -> bool:
        """Whether all was sent."""
        return self._pieces.done

    def send(self, link: Link, most_bytes: int) -> int:
        """Sends the next ones, at most so many bytes; returns how many. Raises what sending does."""
        return send_chunk(link, self._number, self._pieces.take(most_bytes), self._fill)

    def _fill(self, piece: SectionPiece, view: memoryview) -> None:
        view[:] = self._tensors[piece.tensor][piece.start : piece.start + piece.size_bytes]
