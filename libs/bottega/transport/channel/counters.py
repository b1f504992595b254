"""What links have moved, waited and died of, for a service to export."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStatistics:
    """One direction: whole messages, their bytes, and the seconds that they took altogether and at most.

    file_bytes: of files that messages carried; they were not moved, and are in none of the others.
    seconds: of a sender from the credit to the last tensor handed over, of a receiver from the first frame to the
    last tensor there; both hold what the sender computed in between.
    """

    messages: int = 0
    size_bytes: int = 0
    file_bytes: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatistics:
    """The counters at one moment. deaths: by the error's name, orderly closes as LinkClosed."""

    sent: TransferStatistics
    received: TransferStatistics
    credit_wait_s: float
    no_credit: int
    aborted: int
    deaths: Mapping[str, int]


class LinkCounters:
    """Counts for one link, or for as many as it is given to: a service exports one for each kind of link."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = _TransferCounter()
        self._received = _TransferCounter()
        self._credit_wait_s = 0.0
        self._no_credit = 0
        self._aborted = 0
        self._deaths: Counter[str] = Counter()

    def sent(self, size_bytes: int, seconds: float, *, file_bytes: int = 0) -> None:
        """Counts a message that was sent whole."""
        with self._lock:
            self._sent.add(size_bytes, file_bytes, seconds)

    def received(self, size_bytes: int, seconds: float, *, file_bytes: int = 0) -> None:
        """Counts a message that has arrived whole."""
        with self._lock:
            self._received.add(size_bytes, file_bytes, seconds)

    def waited(self, seconds: float, *, in_vain: bool) -> None:
        """Counts a wait for credit."""
        with self._lock:
            self._credit_wait_s += seconds
            self._no_credit += in_vain

    def aborted(self) -> None:
        """Counts a message that its sender took back."""
        with self._lock:
            self._aborted += 1

    def died(self, cause: str) -> None:
        """Counts the end of a link."""
        with self._lock:
            self._deaths[cause] += 1

    def snapshot(self) -> LinkStatistics:
        """All counters, of one moment."""
        with self._lock:
            return LinkStatistics(
                sent=self._sent.flow(),
                received=self._received.flow(),
                credit_wait_s=self._credit_wait_s,
                no_credit=self._no_credit,
                aborted=self._aborted,
                deaths=dict(self._deaths),
            )


class _TransferCounter:
    """Transfer statistics in the making."""

    __slots__ = ("_file_bytes", "_longest_s", "_messages", "_seconds", "_size_bytes")

    def __init__(self) -> None:
        self._messages = self._size_bytes = self._file_bytes = 0
        self._seconds = self._longest_s = 0.0

    def add(self, size_bytes: int, file_bytes: int, seconds: float) -> None:
        self._messages += 1
        self._size_bytes += size_bytes
        self._file_bytes += file_bytes
        self._seconds += seconds
        self._longest_s = max(self._longest_s, seconds)

    def flow(self) -> TransferStatistics:
        return TransferStatistics(
            messages=self._messages,
            size_bytes=self._size_bytes,
            file_bytes=self._file_bytes,
            seconds=self._seconds,
            longest_s=self._longest_s,
        )
