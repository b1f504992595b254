"""The work of a store on a request, as spans of a trace.

The clocks of two hosts are never compared. A store reports how long each part of its work took, and this process knows
when it sent the request and received the response. The trace shows the parts in the middle of that time, as if request
and response had taken equally long on the network. So each part is off by at most half of the network time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bottega.engine.spans import TracedSpan
from bottega.v1.trace_pb2 import StoreTimes

# Parts of the work in order, by field of StoreTimes: the name, and whether the store only waits in it.
_PARTS = {
    "wait_s": ("wait for its turn", True),
    "search_s": ("search", False),
    "select_s": ("select", False),
    "read_s": ("read from the disk", False),
    "check_s": ("compare with the checksum", False),
    "send_wait_s": ("wait to be sent", True),
}
# The track of spans in which a store waits, which `bottega trace` draws in grey.
_WAITS = "waits"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreWork:
    """The work of a store on one request."""

    store: str
    """Name of the store's service."""
    times: StoreTimes
    """The times that the store reported, after they were checked."""
    asked_s: float
    """When the request was sent, on CLOCK_MONOTONIC."""
    answered_s: float
    """When the beginning of the response arrived."""
    sent_s: float | None = None
    """When the last piece of the response arrived; None if it was not sent in pieces."""

    def spans(self, track: str) -> Iterator[TracedSpan]:
        """Yield the parts that took time.

        If together they are longer than the time between request and response, all are shortened by the same factor.
        """
        parts = [(*_PARTS[field.name], seconds) for field, seconds in self.times.ListFields()]
        reported_s, seen_s = sum(seconds for *_, seconds in parts), max(0.0, self.answered_s - self.asked_s)
        share = min(1.0, seen_s / reported_s) if reported_s else 0.0
        begin_s = self.asked_s + (seen_s - share * reported_s) / 2
        for name, waits, seconds in parts:
            yield self._span(name, _WAITS if waits else track, begin_s, share * seconds)
            begin_s += share * seconds
        if self.sent_s is not None:
            yield self._span("send", track, self.answered_s, self.sent_s - self.answered_s)

    def _span(self, name: str, track: str, begin_s: float, seconds: float) -> TracedSpan:
        return TracedSpan(name=name, track=track, begin_s=begin_s, seconds=seconds, service=self.store)
