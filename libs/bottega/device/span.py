"""Time spans of a device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bottega.device.device import Event


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """The time between two events of a device."""

    begin: Event
    end: Event

    @property
    def ready(self) -> bool:
        """Whether the span has ended."""
        return self.begin.ready and self.end.ready

    @property
    def seconds(self) -> float:
        """Its duration. Waits until the span has ended."""
        self.end.wait()
        self.begin.wait()
        return self.end.seconds_since(self.begin)


class SpanSum:
    """The total duration of spans that have ended."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._unread: deque[Span] = deque()

    def add(self, span: Span) -> None:
        """Add a span, which may end later."""
        self._unread.append(span)
        self._read()

    @property
    def seconds(self) -> float:
        """Total seconds of the spans that have ended. Never waits."""
        self._read()
        return self._seconds

    def _read(self) -> None:
        # Spans of a stream end in order, so that no span after the first unfinished one has ended.
        while self._unread and self._unread[0].ready:
            self._seconds += self._unread.popleft().seconds
