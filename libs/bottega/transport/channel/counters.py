"""The state of a link (open or ended), and counters: bytes moved, time waited, and causes of ends.

A link ends once, for one cause, at both ends of both directions together.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from bottega.errors import LinkError
from bottega.transport.channel.backend import BackendEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStatistics:
    """Counters of the complete messages in one direction."""

    messages: int = 0
    size_bytes: int = 0
    file_bytes: int = 0
    """Bytes of files that messages carried. They were shared, not moved, and are not in the other counters."""
    seconds: float = 0.0
    """Total transfer time in seconds. It includes what the sender computed meanwhile.

    A sender counts from the credit to the last tensor sent, a receiver from the first frame to the last tensor.
    """
    longest_s: float = 0.0

    def plus(self, size_bytes: int, file_bytes: int, seconds: float) -> TransferStatistics:
        """Return the counters with one more message."""
        return TransferStatistics(
            messages=self.messages + 1,
            size_bytes=self.size_bytes + size_bytes,
            file_bytes=self.file_bytes + file_bytes,
            seconds=self.seconds + seconds,
            longest_s=max(self.longest_s, seconds),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatistics:
    """A snapshot of LinkCounters."""

    sent: TransferStatistics
    received: TransferStatistics
    credit_wait_s: float
    no_credit: int
    aborted: int
    deaths: Mapping[str, int]
    """Number of ended links by the name of the error; an orderly close counts as LinkClosed."""


class LinkCounters:
    """Counters of one link, or of several links that share them. A service exports one for each kind of link."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = TransferStatistics()
        self._received = TransferStatistics()
        self._credit_wait_s = 0.0
        self._no_credit = 0
        self._aborted = 0
        self._deaths: Counter[str] = Counter()

    def sent(self, size_bytes: int, seconds: float, *, file_bytes: int = 0) -> None:
        """Count a message that was sent completely."""
        with self._lock:
            self._sent = self._sent.plus(size_bytes, file_bytes, seconds)

    def received(self, size_bytes: int, seconds: float, *, file_bytes: int = 0) -> None:
        """Count a message that has arrived completely."""
        with self._lock:
            self._received = self._received.plus(size_bytes, file_bytes, seconds)

    def waited(self, seconds: float, *, in_vain: bool) -> None:
        """Count a wait for credit. `in_vain` means that the wait ended without credit."""
        with self._lock:
            self._credit_wait_s += seconds
            self._no_credit += in_vain

    def aborted(self) -> None:
        """Count a message that its sender aborted."""
        with self._lock:
            self._aborted += 1

    def died(self, cause: str) -> None:
        """Count a link that ended."""
        with self._lock:
            self._deaths[cause] += 1

    def snapshot(self) -> LinkStatistics:
        """Return a consistent snapshot of all counters."""
        with self._lock:
            return LinkStatistics(
                sent=self._sent,
                received=self._received,
                credit_wait_s=self._credit_wait_s,
                no_credit=self._no_credit,
                aborted=self._aborted,
                deaths=dict(self._deaths),
            )


class Lifecycle:
    """The state of a link: open, or ended by a cause."""

    def __init__(self, ends: Sequence[BackendEnd], counters: LinkCounters) -> None:
        self._ends = ends
        self._counters = counters
        self._lock = threading.Lock()
        self.cause: LinkError | None = None  # None while the link is open
        self._died_at = 0.0

    def check(self) -> None:
        """Raise the cause if the link has ended."""
        if self.cause is not None:
            raise _copy(self.cause)

    def end(self, cause: LinkError) -> None:
        """End the link and wake every call that waits on it. Only the first cause counts."""
        with self._lock:
            if self.cause is not None:
                return
            self._died_at = time.monotonic()
            self.cause = cause
        self._counters.died(type(cause).__name__)
        for end in self._ends:
            end.shut_down(cause)

    def fail(self, error: LinkError) -> NoReturn:
        """End the link with this error, and raise its cause, which may be an earlier error."""
        self.end(error)
        assert self.cause is not None
        raise _copy(self.cause) from error

    def dead_for_s(self) -> float:
        """Return the seconds since the link ended; 0 while it is open."""
        return time.monotonic() - self._died_at if self.cause is not None else 0.0


def _copy(cause: LinkError) -> LinkError:
    """Return a copy: if several threads raised the same object, their tracebacks would grow into one."""
    return type(cause)(cause.message, metadata=cause.metadata)
