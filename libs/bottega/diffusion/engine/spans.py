"""What of one job took how long in this process, as `bottega trace` draws it.

A log takes times as they come, the device's among them, and looks at none: it is read once, when the job ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bottega.diffusion.device.device import Device, Event
from bottega.diffusion.device.span import Span

# Of one job: hundreds of steps, with what happens in each.
MAX_SPANS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSpan:
    """Something that took time. begin_s: on CLOCK_MONOTONIC, which all processes of a host share.

    track: what was busy with it, or waited. service: name of that in which it happened; empty: this one.
    """

    name: str
    track: str
    begin_s: float
    seconds: float
    service: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrace:
    """What of a job took how long, by beginnings. dropped: spans that were left out, because there were too many."""

    spans: tuple[TracedSpan, ...] = ()
    dropped: int = 0


class DeviceClock:
    """Brings a device's events to the host's clock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._event: Event | None = None
        self._at_s = 0.0

    def set(self) -> None:
        """Only while the device has nothing to do, so that the event is now. An event's distance loses digits as it
        grows: this is called now and then.
        """
        self._event, self._at_s = self._device.record(), time.monotonic()

    def host_s(self, event: Event) -> float:
        """When an event was, that has been, and was not before the first `set`."""
        assert self._event is not None, "it was set"
        return self._at_s + event.seconds_since(self._event)


class SpanLog:
    """Of one job."""

    def __init__(self, clock: DeviceClock) -> None:
        self._dropped = 0
        self._clock = clock
        self._spans: list[TracedSpan] = []
        self._of_device: list[tuple[str, str, Span, Mapping[str, str]]] = []

    def add(self, span: TracedSpan) -> None:
        """One whose times are known."""
        if self._has_room():
            self._spans.append(span)

    def add_of_device(self, name: str, track: str, span: Span, facts: Mapping[str, str]) -> None:
        """One that may not be over yet, but will be when the log is read."""
        if self._has_room():
            self._of_device.append((name, track, span, facts))

    def read(self) -> EngineTrace:
        """All that are over; never waits: a job that fails ends before its device does."""
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
