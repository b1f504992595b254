"""Hands the spans of attempts to OpenTelemetry, where that is turned on."""

from __future__ import annotations

import time
from collections.abc import Iterable

from bottega.gateway.jobs.job import Job
from bottega.rpc import telemetry
from bottega.v1.trace_pb2 import Span


def export_attempt(job: Job, name: str, spans: Iterable[Span]) -> None:
    """One trace, whose root is the attempt. spans: its own, counted from the job's acceptance."""
    tracer = telemetry.tracer()
    if tracer is None:
        return
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    accepted_ns = time.time_ns() - round((job.clock.monotonic() - job.times.created_at) * 1e9)
    every = sorted(spans, key=lambda span: span.begin_ns)
    begin_ns = every[0].begin_ns if every else 0
    end_ns = max((span.begin_ns + span.duration_ns for span in every), default=0)
    about = {"bottega.job_id": job.job_id, "bottega.request_id": job.request.request_id}
    # A root: what runs it may be whatever freed its place, another job's end among others.
    root = tracer.start_span(f"job, {name}", context=Context(), attributes=about, start_time=accepted_ns + begin_ns)
    inside = set_span_in_context(root)
    for span in every:
        facts = {f"bottega.{key}": value for key, value in span.facts.items()}
        child = tracer.start_span(
            span.name,
            context=inside,
            attributes={"bottega.service": span.service or "gateway", "bottega.track": span.track, **facts},
            start_time=accepted_ns + span.begin_ns,
        )
        child.end(end_time=accepted_ns + span.begin_ns + span.duration_ns)
    root.end(end_time=accepted_ns + end_ns)
