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

    def plus(self, size_bytes: int, file_bytes: int, seconds: float) -> TransferStatistics:
        """With one message more."""
        return TransferStatistics(
            messages=self.messages + 1,
            size_bytes=self.size_bytes + size_bytes,
            file_bytes=self.file_bytes + file_bytes,
            seconds=self.seconds + seconds,
            longest_s=max(self.longest_s, seconds),
        )


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
        self._sent = TransferStatistics()
        self._received = TransferStatistics()
        self._credit_wait_s = 0.0
        self._no_credit = 0
        self._aborted = 0
        self._deaths: Counter[str] = Counter()

    def sent(self, size_bytes: int, seconds: float, *, file_bytes: int = 0) -> None:
        """Counts a message that was sent whole."""
        with self._lock:
            self._sent = self._sent.plus(size_bytes, file_bytes, seconds)

    def received(self, size_bytes: int, seconds: float, *, file_bytes: int = 0) -> None:
        """Counts a message that has arrived whole."""
        with self._lock:
            self._received = self._received.plus(size_bytes, file_bytes, seconds)

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
                sent=self._sent,
                received=self._received,
                credit_wait_s=self._credit_wait_s,
                no_credit=self._no_credit,
                aborted=self._aborted,
                deaths=dict(self._deaths),
            )
