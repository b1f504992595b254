"""What of a job took how long, in all services."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bottega.v1 import trace_pb2

GATEWAY = "gateway"
"""What the spans of the gateway itself have as their service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """Something that took time.

    service: name of the one in which it happened, as in the fleet; "gateway" for the gateway itself.
    track: what was busy with it there, or waited. begin_s: seconds since the gateway accepted the job; those of another
    host's service are as exact as its worker's clock was when the attempt began, and a store's are put in the middle of
    what the worker has waited for it. facts: more about it, for people.
    """

    name: str
    service: str
    track: str
    begin_s: float
    seconds: float
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def end_s(self) -> float:
        """When it was over."""
        return self.begin_s + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrace:
    """spans: by their beginnings. dropped: how many were left out, because a trace has a bound."""

    job_id: str
    spans: tuple[TraceSpan, ...]
    dropped: int = 0


def trace_from(job_id: str, trace: trace_pb2.Trace) -> JobTrace:
    """The trace that the wire describes."""
    spans = tuple(
        TraceSpan(
            name=span.name,
            service=span.service or GATEWAY,
            track=span.track,
            begin_s=span.begin_ns / 1e9,
            seconds=span.duration_ns / 1e9,
            facts=dict(span.facts),
        )
        for span in trace.spans
    )
    return JobTrace(job_id=job_id, spans=spans, dropped=trace.dropped)
