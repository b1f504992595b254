"""Recordings in progress: the worker of each, the sections that it has sent, and the section that is arriving.

One worker at a time may record a template, as long as its connection is open and it sends messages often enough. Any
thread may call these classes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from bottega.activations.records import SectionKey, SectionRecord
from bottega.activations.store.sealed_parts import SectionFile
from bottega.activations.store.settings import DropReason
from bottega.errors import StorageUnavailable

# Upper bound on the recordings of one worker, which has some tens of jobs. Those that wait to be written do not count.
_MOST_OF_A_LINK = 64
# Number of expired recordings that are remembered. For older ones, workers have to ask again.
_MOST_EXPIRED = 1024


@dataclass(slots=True, kw_only=True, eq=False)
class PendingRecording:
    """A template that the worker of `link` is recording."""

    key: str
    link: Hashable
    recording: str = ""
    """ID of the recording; "" until the worker has sent it."""
    seen_s: float
    """Time of the worker's last message."""
    complete: bool = False
    """Whether everything was sent and waits to be written."""
    over: bool = False
    """Whether the recording was abandoned, so that later sections are dropped."""
    sections: dict[SectionKey, SectionRecord] = field(default_factory=dict)
    """Sections that are written. Only the writer thread uses this and `size_bytes`."""
    size_bytes: int = 0


class PendingRecordings:
    """The recordings in progress.

    Args:
        idle_s: Seconds without a message after which a recording is abandoned.
        on_over: Called under the lock with a recording that is abandoned; must not block.
    """

    def __init__(self, *, idle_s: float, now: Callable[[], float], on_over: Callable[[PendingRecording], None]) -> None:
        self._idle_s = idle_s
        self._now = now
        self._on_over = on_over
        self._lock = threading.Lock()
        self._pending: dict[str, PendingRecording] = {}
        self._expired: dict[str, Hashable] = {}  # The connection that may continue an expired recording, by key.

    def __len__(self) -> int:
        return len(self._pending)

    def grant(self, key: str, link: Hashable) -> bool:
        """Return whether the worker of `link` may record the template, which only one worker may do."""
        with self._lock:
            return self._granted(key, link) is not None

    def begin_section(self, key: str, recording: str, link: Hashable) -> PendingRecording | None:
        """Return the recording to which a new section belongs, or None if the worker may not record it.

        An expired recording begins again. A recording whose template was deleted does not, because the new sections
        alone would never be complete.
        """
        with self._lock:
            pending = self._pending.get(key)
            if (pending.link if pending is not None else self._expired.get(key)) != link:
                return None
            found = self._granted(key, link)
            if found is not None and found.recording not in ("", recording):
                self._end(found)  # The worker has started a new recording.
                found = self._granted(key, link)
            if found is not None:
                found.recording = recording
            return found

    def is_being_written(self, key: str, recording: str, link: Hashable) -> bool:
        """Return whether the worker has sent the whole recording and it is not a template yet."""
        with self._lock:
            found = self._pending.get(key)
            return found is not None and found.complete and (found.link, found.recording) == (link, recording)

    def complete(self, key: str, recording: str, link: Hashable) -> PendingRecording | None:
        """Mark a recording as sent and return it, or None. It stays until `remove`, without its connection too."""
        with self._lock:
            found = self._pending.get(key)
            self._forget_expired(lambda expired, of: expired == key and of == link)
            if found is None or found.complete or found.link != link or found.recording not in ("", recording):
                return None
            found.complete = True
            return found

    def remove(self, pending: PendingRecording) -> None:
        """Remove a recording that was written or dropped."""
        with self._lock:
            if self._pending.get(pending.key) is pending:
                del self._pending[pending.key]

    def abandon(self, key: str, recording: str, link: Hashable) -> None:
        """Abandon a worker's recording, if there is one."""
        with self._lock:
            self._end_those(lambda each: each.key == key and each.link == link and each.recording in ("", recording))
            self._forget_expired(lambda expired, of: expired == key and of == link)

    def end_link(self, link: Hashable) -> None:
        """Abandon all incomplete recordings of a connection."""
        with self._lock:
            self._end_those(lambda each: each.link == link)
            self._forget_expired(lambda _, of: of == link)

    def end_all(self) -> list[PendingRecording]:
        """Abandon all recordings and return them."""
        with self._lock:
            ended = list(self._pending.values())
            for each in ended:
                self._end(each)
            return ended

    def expire(self) -> None:
        """Abandon idle recordings."""
        with self._lock:
            self._expired |= {each.key: each.link for each in self._end_those(self._is_idle)}
            while len(self._expired) > _MOST_EXPIRED:
                del self._expired[next(iter(self._expired))]  # The oldest.

    # The methods below require the lock.

    def _end_those(self, which: Callable[[PendingRecording], bool]) -> list[PendingRecording]:
        ended = [each for each in self._pending.values() if not each.complete and which(each)]
        for each in ended:
            self._end(each)
        return ended

    def _forget_expired(self, which: Callable[[str, Hashable], bool]) -> None:
        self._expired = {key: link for key, link in self._expired.items() if not which(key, link)}

    def _granted(self, key: str, link: Hashable) -> PendingRecording | None:
        found = self._pending.get(key)
        if found is not None and found.link != link and not found.complete and self._is_idle(found):
            self._end(found)
            found = None
        if found is None and self._count(link) < _MOST_OF_A_LINK:
            found = self._pending[key] = PendingRecording(key=key, link=link, seen_s=self._now())
            self._expired.pop(key, None)
        if found is None or found.complete or found.link != link:
            return None
        found.seen_s = self._now()
        return found

    def _count(self, link: Hashable) -> int:
        return sum(each.link == link and not each.complete for each in self._pending.values())

    def _is_idle(self, pending: PendingRecording) -> bool:
        return self._now() - pending.seen_s > self._idle_s

    def _end(self, pending: PendingRecording) -> None:
        del self._pending[pending.key]
        pending.over = True
        self._on_over(pending)


class SectionIntake:
    """Receives one section, in the receiving thread of its connection.

    Args:
        pending: The recording; None if the section replaces one of an existing template.
        on_whole: Called with the descriptor of the sealed file when all chunks have arrived.
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
        """Copy the next chunk, which begins at `start` of `tensor`. If memory is short, the section is dropped.

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
        """Drop the section if it is incomplete."""
        if self._open:
            self._open = False
            self._file.close()
            self._on_drop(reason)

    def expire(self, idle_s: float) -> None:
        """Drop the section if it was idle for `idle_s` seconds, or if its recording was abandoned."""
        over = self._pending is not None and self._pending.over
        if over or self._now() - self._seen_s > idle_s:
            self.drop(DropReason.ABANDONED)
