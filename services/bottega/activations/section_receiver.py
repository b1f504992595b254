"""Receives the sections that a worker sends to be recorded, one at a time per link, in chunks.

A section that the store does not accept is still read and discarded, because the worker has sent it before it could be
refused. If the worker may not record the template, it is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from bottega.activations.store.intake import SectionIntake
from bottega.activations.store.statistics import DropReason
from bottega.activations.store.store import ActivationStore
from bottega.sections import SectionLayout
from bottega.v1.activations_pb2 import ChunkHeader, SectionHeader


class SectionReceiver:
    """Receives the sections of one link, in the receiving thread.

    `on_not_granted` is called for sections of a recording that the worker may not make.
    """

    def __init__(
        self, store: ActivationStore, link: Hashable, *, on_not_granted: Callable[[SectionHeader], None]
    ) -> None:
        self._store = store
        self._link = link
        self._on_not_granted = on_not_granted
        self._number: int | None = None
        self._intake: SectionIntake | None = None

    def begin(self, number: int, header: SectionHeader, layout: SectionLayout) -> None:
        """Begin a section, dropping one that is incomplete. Raise ValueError if the header breaks a rule."""
        self.drop()
        self._number = number
        begun = self._store.begin_section(header, layout, self._link)
        if begun is DropReason.NOT_GRANTED:
            self._on_not_granted(header)
        self._intake = begun if isinstance(begun, SectionIntake) else None

    def take(self, number: int, chunk: ChunkHeader, data: memoryview) -> None:
        """Add the next chunk. Raise ValueError if it is out of order or of another section."""
        if number != self._number:
            raise ValueError("a chunk must belong to the section that the worker has begun")
        if self._intake is not None and self._intake.is_open:
            self._intake.write(chunk.tensor, chunk.start, data)

    def expire(self) -> None:
        """Drop the section if it is idle or its recording was abandoned. Call it periodically."""
        if self._intake is not None:
            self._intake.expire(self._store.record_idle_s)

    def drop(self) -> None:
        """Drop the section that has begun, if any."""
        if self._intake is not None:
            self._intake.drop(DropReason.ABANDONED)
            self._intake = None
