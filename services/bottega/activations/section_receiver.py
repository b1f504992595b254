"""The section that a worker is sending to be recorded: a link has one at a time, and its chunks in their order.

What the store does not take is read all the same, and forgotten: the worker has sent it before it could be told. Where
its recording is none that the store takes, the worker is told.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from bottega.activations.store.intake import SectionIntake
from bottega.activations.store.statistics import DropReason
from bottega.activations.store.store import ActivationStore
from bottega.sections import SectionLayout
from bottega.v1.activations_pb2 import ChunkHeader, SectionHeader


class SectionReceiver:
    """link: by which the store knows the worker. on_not_granted: told of a section whose recording the worker may not
    give. By the thread that receives."""

    def __init__(
        self, store: ActivationStore, link: Hashable, *, on_not_granted: Callable[[SectionHeader], None]
    ) -> None:
        self._store = store
        self._link = link
        self._on_not_granted = on_not_granted
        self._number: int | None = None
        self._intake: SectionIntake | None = None

    def begin(self, number: int, header: SectionHeader, layout: SectionLayout) -> None:
        """A section begins; one that is not whole by now never will be. Raises ValueError for what breaks a rule."""
        self.drop()
        self._number = number
        begun = self._store.begin_section(header, layout, self._link)
        if begun is DropReason.NOT_GRANTED:
            self._on_not_granted(header)
        self._intake = begun if isinstance(begun, SectionIntake) else None

    def take(self, number: int, chunk: ChunkHeader, data: memoryview) -> None:
        """The next chunk. Raises ValueError for one that is not, or of another section."""
        if number != self._number:
            raise ValueError("a worker sends chunks of the section that it has begun, and of no other")
        if self._intake is not None and self._intake.is_open:
            self._intake.write(chunk.tensor, chunk.start, data)

    def expire(self) -> None:
        """Forgets one of which nothing more comes, or whose recording was given up. To be called now and then."""
        if self._intake is not None:
            self._intake.expire(self._store.record_idle_s)

    def drop(self) -> None:
        """The rest of what has begun will not come."""
        if self._intake is not None:
            self._intake.drop(DropReason.ABANDONED)
            self._intake = None
