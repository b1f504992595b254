"""Templates that are being recorded: by which worker each is, and what has come of it so far.

A template is recorded by one worker at a time, while its link lives and it sends something now and then. Any thread may
call it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from bottega.activations.template import SectionKey, SectionRecord

# Of one worker, which has some tens of jobs under way. What was sent whole only waits to be written.
_MOST_OF_A_LINK = 64
# Of those given up for being idle: one whose worker has not gone on by then asks again.
_MOST_EXPIRED = 1024


@dataclass(slots=True, kw_only=True, eq=False)
class PendingRecording:
    """A template that `link` may record. recording: its name, empty until the worker has said it.

    seen_s: when something was last heard of it. complete: whether all of it was sent, and is being written. over:
    whether it came to nothing: what still comes of it is not kept. sections, size_bytes: whose files are written, of
    the thread that writes alone.
    """

    key: str
    link: Hashable
    recording: str = ""
    seen_s: float
    complete: bool = False
    over: bool = False
    sections: dict[SectionKey, SectionRecord] = field(default_factory=dict)
    size_bytes: int = 0


class PendingRecordings:
    """idle_s: after which one of which nothing comes is given up. on_over: called with one that came to nothing, under
    the lock: it only has its files deleted later.
    """

    def __init__(self, *, idle_s: float, now: Callable[[], float], on_over: Callable[[PendingRecording], None]) -> None:
        self._idle_s = idle_s
        self._now = now
        self._on_over = on_over
        self._lock = threading.Lock()
        self._pending: dict[str, PendingRecording] = {}
        self._expired: dict[str, Hashable] = {}  # by key, of those given up for being idle: whose link may go on

    def __len__(self) -> int:
        return len(self._pending)

    def grant(self, key: str, link: Hashable) -> bool:
        """Whether the worker may record the template: nobody else does then. It may ask again."""
        with self._lock:
            return self._granted(key, link) is not None

    def begin_section(self, key: str, recording: str, link: Hashable) -> PendingRecording | None:
        """What a section belongs to that has come; None where it is not for this worker to record.

        One that was given up for being idle begins again. What became a template, and went, does not: sections of it
        alone would never be completed.
        """
        with self._lock:
            pending = self._pending.get(key)
            if (pending.link if pending is not None else self._expired.get(key)) != link:
                return None
            found = self._granted(key, link)
            if found is not None and found.recording not in ("", recording):
                self._end(found)  # the worker has begun anew
                found = self._granted(key, link)
            if found is not None:
                found.recording = recording
            return found

    def is_being_written(self, key: str, recording: str, link: Hashable) -> bool:
        """Whether the worker has sent all of it, and it is no template yet."""
        with self._lock:
            found = self._pending.get(key)
            return found is not None and found.complete and (found.link, found.recording) == (link, recording)

    def complete(self, key: str, recording: str, link: Hashable) -> PendingRecording | None:
        """All of it was sent: it stays until `remove`, whatever becomes of the link. None where there is none such."""
        with self._lock:
            found = self._pending.get(key)
            self._forget_expired(lambda expired, of: expired == key and of == link)
            if found is None or found.complete or found.link != link or found.recording not in ("", recording):
                return None
            found.complete = True
            return found

    def remove(self, pending: PendingRecording) -> None:
        """It is a template now, or nothing."""
        with self._lock:
            if self._pending.get(pending.key) is pending:
                del self._pending[pending.key]

    def abandon(self, key: str, recording: str, link: Hashable) -> None:
        """The worker has given it up, before its first section or later. Harmless where there is none such."""
        with self._lock:
            self._end_those(lambda each: each.key == key and each.link == link and each.recording in ("", recording))
            self._forget_expired(lambda expired, of: expired == key and of == link)

    def end_link(self, link: Hashable) -> None:
        """The worker is gone, and what it was recording."""
        with self._lock:
            self._end_those(lambda each: each.link == link)
            self._forget_expired(lambda _, of: of == link)

    def end_all(self) -> list[PendingRecording]:
        """All come to nothing; which ones."""
        with self._lock:
            ended = list(self._pending.values())
            for each in ended:
                self._end(each)
            return ended

    def expire(self) -> None:
        """Gives up those of which nothing has come for long."""
        with self._lock:
            self._expired |= {each.key: each.link for each in self._end_those(self._is_idle)}
            while len(self._expired) > _MOST_EXPIRED:
                del self._expired[next(iter(self._expired))]  # the oldest

    # Below: under the lock.

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
