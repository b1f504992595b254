"""Receives a section in chunks. Its reserved room is freed when it is written or dropped."""

from __future__ import annotations

from collections.abc import Callable

from bottega.activations.store.recordings import PendingRecording
from bottega.activations.store.sealed_parts import SectionFile
from bottega.activations.store.statistics import DropReason
from bottega.errors import StorageUnavailable


class SectionIntake:
    """Receives one section, in the receiving thread of its link.

    Args:
        pending: Its recording; None if it is for an existing template.
        on_whole: Called with the sealed file's descriptor when all chunks have come.
        on_drop: Called with the reason if the section is dropped instead.
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
        """Whether more chunks are expected."""
        return self._open

    def write(self, tensor: int, start: int, data: memoryview) -> None:
        """Copy the next chunk, which begins at `start` of `tensor`. Without memory, the section is dropped.

        Raise ValueError if the chunk is not the next one.
        """
        self._seen_s = self._now()
        if self._pending is not None:
            self._pending.seen_s = self._seen_s  # A large section may take longer than `record_idle_s`.
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
        """Drop the section, if it is incomplete."""
        if self._open:
            self._open = False
            self._file.close()
            self._on_drop(reason)

    def expire(self, idle_s: float) -> None:
        """Drop the section if it was idle for so long, or if its recording has ended."""
        over = self._pending is not None and self._pending.over
        if over or self._now() - self._seen_s > idle_s:
            self.drop(DropReason.ABANDONED)
