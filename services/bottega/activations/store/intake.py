"""A section that a worker sends to be recorded, in chunks: room is reserved for it until it is written, or dropped."""

from __future__ import annotations

from collections.abc import Callable

from bottega.activations.store.recordings import PendingRecording
from bottega.activations.store.sealed_parts import SectionFile
from bottega.activations.store.statistics import DropReason
from bottega.errors import StorageUnavailable


class SectionIntake:
    """Of one link: its thread that receives calls it.

    pending: what it is recorded for; None where it is for a template that is there. on_whole: called with the
    descriptor of its file, sealed, when all has come. on_drop: called instead, with why.
    """

    def __init__(
        self,
        file: SectionFile,
        *,
        pending: PendingRecording | None,
        now: Callable[[], float],
        on_whole: Callable[[int], None],
        on_drop: Callable[[DropReason], None],
    ) -> None:
        self._file = file
        self._pending = pending
        self._now = now
        self._on_whole = on_whole
        self._on_drop = on_drop
        self._seen_s = now()
        self._open = True

    @property
    def is_open(self) -> bool:
        """Whether it takes more."""
        return self._open

    def write(self, tensor: int, start: int, data: memoryview) -> None:
        """Takes a copy of the next chunk; without memory for it the section is dropped. tensor, start: where it begins.

        Raises ValueError for one that is not the next.
        """
        self._seen_s = self._now()
        if self._pending is not None:
            self._pending.seen_s = self._seen_s  # a large one may take longer than recordings may be idle
        try:
            self._file.write(tensor, start, data)
            if not self._file.is_whole:
                return
            descriptor = self._file.seal()
        except StorageUnavailable:
            self.drop(DropReason.TROUBLE)
            return
        self._open = False
        self._on_whole(descriptor)

    def drop(self, reason: DropReason) -> None:
        """The rest will not come. Harmless where it has."""
        if self._open:
            self._open = False
            self._file.close()
            self._on_drop(reason)

    def expire(self, idle_s: float) -> None:
        """Drops it where nothing has come of it for so long, or its recording is worth nothing."""
        over = self._pending is not None and self._pending.over
        if over or self._now() - self._seen_s > idle_s:
            self.drop(DropReason.ABANDONED)
