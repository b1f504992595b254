"""What links have moved, waited and died of, for a service to export. It knows no Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One direction: whole messages, their bytes, and the seconds that they took altogether and at most.

    seconds: of a sender from the credit to the last tensor handed over, of a receiver from the first notice to the
    last tensor there; both hold what the sender computed in between.
    """

    messages: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The counters at one moment. deaths: by the error's name, orderly closes as LinkClosed."""

    sent: Flow
    received: Flow
    credit_wait_s: float
    no_credit: int
    aborted: int
    deaths: Mapping[str, int]


class Counters:
    """Counts for one link, or for as many as it is given to: a service exports one for each kind of link."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = Flow()
        self._received = Flow()
        self._credit_wait_s = 0.0
        self._no_credit = 0
        self._aborted = 0
        self._deaths: Counter[str] = Counter()

    def sent(self, size_bytes: int, seconds: float) -> None:
        """Counts a message that was sent whole."""
        with self._lock:
            self._sent = _more(self._sent, size_bytes, seconds)

    def received(self, size_bytes: int, seconds: float) -> None:
        """Counts a message that has arrived whole."""
        with self._lock:
            self._received = _more(self._received, size_bytes, seconds)

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

    def snapshot(self) -> Snapshot:
        """All counters, of one moment."""
        with self._lock:
            return Snapshot(
                sent=self._sent,
                received=self._received,
                credit_wait_s=self._credit_wait_s,
                no_credit=self._no_credit,
                aborted=self._aborted,
                deaths=dict(self._deaths),
            )


def _more(flow: Flow, size_bytes: int, seconds: float) -> Flow:
    return Flow(
        messages=flow.messages + 1,
        size_bytes=flow.size_bytes + size_bytes,
        seconds=flow.seconds + seconds,
        longest_s=max(flow.longest_s, seconds),
    )
