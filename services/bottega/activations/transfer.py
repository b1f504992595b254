"""The transfer of a section to a worker of another host, in pieces between which other messages may be sent.

Bytes are read from the file straight into the link's slots.
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
    """A worker's request for a section."""

    number: int
    """The worker's number of the request."""
    digest: str
    tensors: tuple[int, ...]
    """Places of the requested tensors in the section; empty for all."""
    edit: int
    """See `SectionRequest`."""
    order: int
    """Place of the request among all of the worker."""
    requested_s: float = field(default_factory=time.monotonic)
    """Time of arrival, on the monotonic clock."""
    waited_s: float = 0.0
    """Seconds in the queue."""

    def times(self, lease: CacheLease) -> StoreTimes:
        """Return the store's times for the request until now, when the lease is sent."""
        times = lease.times_until_now()
        times.wait_s += self.waited_s
        return times


class SectionTransfer:
    """A lease that is being sent. Raises InvalidRequest if tensors are requested that the section does not have."""

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
        """Whether everything requested was sent."""
        return self._pieces.done

    def send_piece(self, link: Link, most_bytes: int) -> int:
        """Send the next bytes, up to `most_bytes`, and return how many were sent.

        Raise InternalError if the file has become shorter, or the error of the link.
        """
        times = None if self._begun else self._requested.times(self.lease)
        self._begun = True
        return send_chunk(link, self.number, self._pieces.take(most_bytes), self._fill, times=times)

    def _fill(self, piece: SectionPiece, view: memoryview) -> None:
        """Read bytes of the file into a tensor of a slot."""
        place, done = self._layout.offsets[piece.tensor] + piece.start, 0
        while done < len(view):
            got = os.preadv(self.lease.descriptor, [view[done:]], place + done)
            if not got:
                raise InternalError("a section's file has become shorter while it was sent")
            done += got
