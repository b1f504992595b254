"""A section on its way to a worker of another host: its tensors in the order of their use, in pieces between which
others may speak. Reads the file straight into the link's slots.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from bottega.caching import CacheLease
from bottega.errors import InternalError, InvalidRequest
from bottega.sections.pieces import SectionPiece, SectionPieces, send_chunk
from bottega.sections.section import SectionLayout
from bottega.transport import Link
from bottega.v1.trace_pb2 import StoreTimes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SectionRequested:
    """What a worker asked for. number: as it calls it. tensors: places of them in the section, empty is all. order: its
    place among all that the worker has asked for. edit: see SectionRequest. requested_s: when it came, on the monotonic
    clock; waited_s: for its turn, then."""

    number: int
    digest: str
    tensors: tuple[int, ...]
    edit: int
    order: int
    requested_s: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0

    def times(self, lease: CacheLease) -> StoreTimes:
        """That it has taken until now, when the lease is sent."""
        times = lease.times_until_now()
        times.wait_s += self.waited_s
        return times


class SectionTransfer:
    """A lease that is being sent. layout: of the section. Raises InvalidRequest for tensors that it does not have."""

    def __init__(self, requested: SectionRequested, lease: CacheLease, layout: SectionLayout) -> None:
        self.number = requested.number
        self.edit = requested.edit
        self.order = requested.order
        self.lease = lease
        self._requested = requested
        self._begun = False
        self._layout = layout
        try:
            self._pieces = SectionPieces(layout, requested.tensors or None)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    @property
    def done(self) -> bool:
        """Whether all was sent that was asked for."""
        return self._pieces.done

    def send_piece(self, link: Link, most_bytes: int) -> int:
        """Sends the next bytes, of as many tensors as they are; returns how many. Raises InternalError where the file
        has become shorter, and what sending does."""
        times = None if self._begun else self._requested.times(self.lease)
        self._begun = True
        return send_chunk(link, self.number, self._pieces.take(most_bytes), self._fill, times=times)

    def _fill(self, piece: SectionPiece, view: memoryview) -> None:
        """Reads bytes of the file into a tensor of a slot."""
        place, done = self._layout.offsets[piece.tensor] + piece.start, 0
        while done < len(view):
            got = os.preadv(self.lease.descriptor, [view[done:]], place + done)
            if not got:
                raise InternalError("a section's file has become shorter while it was sent")
            done += got
