"""What of one attempt took how long, in the front and in the engine, since the worker got it."""

from __future__ import annotations

import time

from bottega.v1.trace_pb2 import Trace

# What the front does: codecs' work for the attempt.
_TRACK = "codec"


class AttemptTrace:
    """Begins now."""

    def __init__(self) -> None:
        self._began_ns = time.monotonic_ns()
        self._trace = Trace()

    def add(self, name: str, *, began_s: float, seconds: float) -> None:
        """Something in the front. began_s: on CLOCK_MONOTONIC."""
        self._trace.spans.add(
            name=name,
            track=_TRACK,
            begin_ns=round(began_s * 1e9) - self._began_ns,
            duration_ns=round(seconds * 1e9),
        )

    def take(self, engine: Trace) -> None:
        """All that the engine says, which counts from the beginning of the clock that both have."""
        self._trace.dropped += engine.dropped
        for span in engine.spans:
            taken = self._trace.spans.add()
            taken.CopyFrom(span)
            taken.begin_ns -= self._began_ns

    def message(self) -> Trace:
        """As it goes to the gateway."""
        self._trace.spans.sort(key=lambda span: span.begin_ns)
        return self._trace
