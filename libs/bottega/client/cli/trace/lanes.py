"""How a trace is laid out: services under each other, in each its tracks, in each the lanes that its spans need.

Spans of one lane do not overlap, or lie in each other: so trace viewers draw them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bottega.client.types.trace import GATEWAY, JobTrace, TraceSpan

# Below it two spans that touch do not overlap: seconds have gone through nanoseconds and back.
_TOUCH_S = 2e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """spans: by beginnings; a longer one before those that lie in it."""

    service: str
    track: str
    spans: Sequence[TraceSpan]


def lanes_of(trace: JobTrace) -> list[Lane]:
    """The gateway's first, then services by the time of their first span, their tracks likewise."""
    spans = sorted(trace.spans, key=lambda span: (span.service != GATEWAY, span.begin_s, -span.seconds))
    services = dict.fromkeys(span.service for span in spans)
    return [lane for service in services for lane in _service_lanes(service, spans)]


def busy_s(spans: Iterable[TraceSpan]) -> float:
    """Seconds in which at least one of them was under way."""
    total_s, end_s = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.begin_s):
        total_s += max(0.0, span.end_s - max(span.begin_s, end_s))
        end_s = max(end_s, span.end_s)
    return total_s


def _service_lanes(service: str, spans: Sequence[TraceSpan]) -> Iterable[Lane]:
    own = [span for span in spans if span.service == service]
    for track in dict.fromkeys(span.track for span in own):
        for lane in _split(span for span in own if span.track == track):
            yield Lane(service=service, track=track, spans=lane)


def _split(spans: Iterable[TraceSpan]) -> list[list[TraceSpan]]:
    """Into as few lanes as it takes when each span goes into the first one that has room for it."""
    lanes: list[list[TraceSpan]] = []
    open_ends: list[list[float]] = []  # of each lane, when what has begun and not ended ends: the innermost last
    for span in spans:
        for lane, ends in zip(lanes, open_ends, strict=True):
            while ends and ends[-1] <= span.begin_s + _TOUCH_S:
                ends.pop()
            if not ends or span.end_s <= ends[-1] + _TOUCH_S:
                lane.append(span)
                ends.append(span.end_s)
                break
        else:
            lanes.append([span])
            open_ends.append([span.end_s])
    return lanes
