"""How long something took on a device, as far as that has got."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bottega.diffusion.device.device import Event


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """From one event of a device to another one."""

    begin: Event
    end: Event

    @property
    def ready(self) -> bool:
        """Whether it is over."""
        return self.begin.ready and self.end.ready

    @property
    def seconds(self) -> float:
        """Its length; waits until it is over."""
        self.end.wait()
        self.begin.wait()
        return self.end.seconds_since(self.begin)


class SpanSum:
    """Seconds of spans, each added when it is over."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._unread: deque[Span] = deque()

    def add(self, span: Span) -> None:
        """One that may not be over."""
        self._unread.append(span)
        self._read()

    @property
    def seconds(self) -> float:
        """Of those that are over. Never waits."""
        self._read()
        return self._seconds

    def _read(self) -> None:
        # In the order of their stream: the first that is not over hides no other that is.
        while self._unread and self._unread[0].ready:
            self._seconds += self._unread.popleft().seconds
