"""The times of one job in the engine's process, as `bottega trace` draws them.

A log stores spans as they are made, including those of the device, and reads their times once, when the job ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bottega.device.device import Device, Event, Span
from bottega.v1.trace_pb2 import StoreTimes

# Maximum for one job, which has hundreds of steps.
MAX_SPANS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSpan:
    """A named time span in a trace."""

    name: str
    track: str
    """Line of the drawing that shows the span, named after the component that worked or waited."""
    begin_s: float
    """On CLOCK_MONOTONIC, which all processes of a host share."""
    seconds: float
    service: str = ""
    """Name of the service in which it happened; "" for this one."""
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrace:
    """The spans of a job in the engine's process."""

    spans: tuple[TracedSpan, ...] = ()
    """Sorted by begin."""
    dropped: int = 0
    """Number of spans that were left out because there were too many."""


class DeviceClock:
    """Converts times of a device's events to the host's clock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._event: Event | None = None
        self._at_s = 0.0

    def set(self) -> None:
        """Set the clock to the current time of the device, which must be idle.

        Call it now and then: the later an event is, the less exact its time.
        """
        self._event, self._at_s = self._device.record(), time.monotonic()

    def host_s(self, event: Event) -> float:
        """Return when an event happened, in seconds of CLOCK_MONOTONIC. It must be later than the first `set`."""
        assert self._event is not None, "`set` was called"
        return self._at_s + event.seconds_since(self._event)


class SpanLog:
    """The spans of one job, at most `MAX_SPANS`."""

    def __init__(self, clock: DeviceClock) -> None:
        self._dropped = 0
        self._clock = clock
        self._spans: list[TracedSpan] = []
        self._of_device: list[tuple[str, str, Span, Mapping[str, str]]] = []

    def add(self, span: TracedSpan) -> None:
        """Add a span whose times are known."""
        if self._has_room():
            self._spans.append(span)

    def add_of_device(self, name: str, track: str, span: Span, facts: Mapping[str, str]) -> None:
        """Add a span of the device, which may end later."""
        if self._has_room():
            self._of_device.append((name, track, span, facts))

    def read(self) -> EngineTrace:
        """Return all spans that have ended. Never waits: a failed job ends before the device has finished its work."""
        spans = sorted([*self._spans, *self._read_of_device()], key=lambda span: span.begin_s)
        return EngineTrace(spans=tuple(spans), dropped=self._dropped)

    def _read_of_device(self) -> Iterator[TracedSpan]:
        for name, track, span, facts in self._of_device:
            if span.ready:
                begin_s = self._clock.host_s(span.begin)
                yield TracedSpan(name=name, track=track, begin_s=begin_s, seconds=span.seconds, facts=facts)

    def _has_room(self) -> bool:
        room = len(self._spans) + len(self._of_device) < MAX_SPANS
        self._dropped += not room
        return room


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
    """The work of a store on one request.

    The clocks of two hosts are never compared. A store reports how long each part of its work took, and this process
    knows when it sent the request and received the response. The trace shows the parts in the middle of that time, as
    if request and response had taken equally long on the network. So each part is off by at most half of the network
    time.
    """

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
