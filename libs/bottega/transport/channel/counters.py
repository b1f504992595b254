"""Counters of what links moved, how long they waited and why they ended, for a service to export."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStatistics:
    """Counters of the complete messages of one direction."""

    messages: int = 0
    size_bytes: int = 0
    file_bytes: int = 0
    """Bytes of files that messages carried. They were not moved and are not in the other counters."""
    seconds: float = 0.0
    """Total transfer time, which includes what the sender computed meanwhile.

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
    """The counters at one moment."""

    sent: TransferStatistics
    received: TransferStatistics
    credit_wait_s: float
    no_credit: int
    aborted: int
    deaths: Mapping[str, int]
    """Number of ended links by error name; an orderly close counts as LinkClosed."""


class LinkCounters:
    """Counters of one link, or of all links that share them. A service exports one for each kind of link."""

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
        """Count a wait for credit; `in_vain` if none came."""
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
        """Return all counters, read at one moment."""
        with self._lock:
            return LinkStatistics(
                sent=self._sent,
                received=self._received,
                credit_wait_s=self._credit_wait_s,
                no_credit=self._no_credit,
                aborted=self._aborted,
                deaths=dict(self._deaths),
            )
