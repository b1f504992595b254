"""The time line of a job in all services."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bottega.v1 import trace_pb2

GATEWAY = "gateway"
"""The service of the gateway's own spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """A span of time in which a service worked on a job, or waited for something."""

    name: str
    service: str
    """Name of the service in the fleet; "gateway" for the gateway itself."""
    track: str
    """The part of the service that was busy, or waited."""
    begin_s: float
    """Seconds since the gateway accepted the job.

    On another host they are as exact as the worker's clock was when the attempt began. A store's span is put in the
    middle of the time that the worker waited for it.
    """
    seconds: float
    facts: Mapping[str, str] = field(default_factory=dict)
    """Details, for people."""

    @property
    def end_s(self) -> float:
        """Seconds from the job's acceptance to the end of the span."""
        return self.begin_s + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrace:
    """The spans of a job."""

    job_id: str
    spans: tuple[TraceSpan, ...]
    """Spans, by their beginnings."""
    dropped: int = 0
    """Number of spans that were left out, because a trace has a size limit."""


def trace_from(job_id: str, trace: trace_pb2.Trace) -> JobTrace:
    """Return the trace that the wire describes."""
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
