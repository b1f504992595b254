"""What a store has done for a request, as rows of it in a trace.

The clocks of two hosts are never compared: a store says how long its parts took, and when it was asked and had
answered is seen here. The parts stand in the middle of that time, as if the question had been as long on its way as the
answer: so each is off by half of what both were on their way, at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bottega.diffusion.engine.spans import TracedSpan
from bottega.v1.trace_pb2 import StoreTimes

# What a part is called, and whether the store only waits in it; by field, in their order.
_PARTS = {
    "wait_s": ("wait for its turn", True),
    "search_s": ("search", False),
    "select_s": ("select", False),
    "read_s": ("read from the disk", False),
    "check_s": ("compare with the checksum", False),
    "send_wait_s": ("wait to be sent", True),
}
# The track of all that waits, which `bottega trace` draws in grey.
_WAITS = "waits"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreWork:
    """On one request. store: name of it, as in the fleet. times: that were checked.

    asked_s, answered_s: when it was asked, and when the beginning of its answer was here, on CLOCK_MONOTONIC.
    sent_s: when the rest was, where that came piece by piece; None otherwise.
    """

    store: str
    times: StoreTimes
    asked_s: float
    answered_s: float
    sent_s: float | None = None

    def spans(self, track: str) -> Iterator[TracedSpan]:
        """Those of its parts that took time, within what was seen here: longer ones are shortened, all by as much."""
        parts = [(*_PARTS[field.name], seconds) for field, seconds in self.times.ListFields()]
        said_s, seen_s = sum(seconds for *_, seconds in parts), max(0.0, self.answered_s - self.asked_s)
        share = min(1.0, seen_s / said_s) if said_s else 0.0
        begin_s = self.asked_s + (seen_s - share * said_s) / 2
        for name, waits, seconds in parts:
            yield self._span(name, _WAITS if waits else track, begin_s, share * seconds)
            begin_s += share * seconds
        if self.sent_s is not None:
            yield self._span("send", track, self.answered_s, self.sent_s - self.answered_s)

    def _span(self, name: str, track: str, begin_s: float, seconds: float) -> TracedSpan:
        return TracedSpan(name=name, track=track, begin_s=begin_s, seconds=seconds, service=self.store)
