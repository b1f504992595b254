"""The traces of recent jobs. A trace has the gateway's own spans and those of workers, on one clock."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from bottega.gateway.jobs.job import Job
from bottega.rpc import telemetry
from bottega.v1.trace_pb2 import Span, Trace

# Upper bound on the spans of a job, whose attempts may be many; more are dropped and counted.
_MAX_SPANS = 4000
# Upper bound on the trace that a worker sends of an attempt.
_MAX_ATTEMPT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimes:
    """The times of one attempt, in seconds on the gateway's monotonic clock."""

    number: int
    worker: str
    queued_at: float
    sent_at: float
    ended_at: float
    trace: Trace
    """The worker's trace. Its times count from `sent_at`."""


class JobTraces:
    """The traces of recent jobs, in memory only: a restarted gateway has none.

    Args:
        budget_bytes: Upper bound on the bytes of all traces. The traces that were extended longest ago are dropped
            first.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.size_bytes = 0
        self._budget_bytes = budget_bytes
        self._traces: OrderedDict[str, Trace] = OrderedDict()

    def find(self, job_id: str) -> Trace | None:
        """Return the trace of a job with its spans sorted by begin, or None if there is none."""
        return self._traces.get(job_id)

    def remove(self, job_id: str) -> None:
        """Delete the trace of a job, if there is one."""
        trace = self._traces.pop(job_id, None)
        if trace is not None:
            self.size_bytes -= trace.ByteSize()

    def add_attempt(self, job: Job, attempt: AttemptTimes) -> None:
        """Add an attempt that has ended to the trace of its job."""
        name = f"attempt {attempt.number}"
        made = Trace()
        _add(made, job, name="queue", track="jobs", begin_at=attempt.queued_at, end_at=attempt.sent_at)
        facts = {"worker": attempt.worker}
        _add(made, job, name=name, track="attempts", begin_at=attempt.sent_at, end_at=attempt.ended_at, facts=facts)
        _take(made, attempt, since_ns=_ns(attempt.sent_at - job.times.created_at))
        _export_attempt(job, name, made.spans)
        before = self._traces.pop(job.job_id, None)
        if before is not None:
            self.size_bytes -= before.ByteSize()
        trace = before or _accepted(job)
        trace.spans.extend(made.spans)
        trace.dropped += made.dropped
        trace.spans.sort(key=lambda span: span.begin_ns)
        if len(trace.spans) > _MAX_SPANS:
            trace.dropped += len(trace.spans) - _MAX_SPANS
            del trace.spans[_MAX_SPANS:]
        self._keep(job.job_id, trace)

    def _keep(self, job_id: str, trace: Trace) -> None:
        self._traces[job_id] = trace
        self.size_bytes += trace.ByteSize()
        while self.size_bytes > self._budget_bytes:
            _, forgotten = self._traces.popitem(last=False)
            self.size_bytes -= forgotten.ByteSize()


def _accepted(job: Job) -> Trace:
    trace = Trace()
    stored_at = job.times.created_at + (job.times.acknowledge_s or 0.0)
    _add(trace, job, name="store the job", track="jobs", begin_at=job.times.created_at, end_at=stored_at)
    return trace


def _add(
    trace: Trace,
    job: Job,
    *,
    name: str,
    track: str,
    begin_at: float,
    end_at: float,
    facts: dict[str, str] | None = None,
) -> None:
    """Add a span of the gateway to a trace."""
    trace.spans.add(
        name=name,
        track=track,
        begin_ns=_ns(begin_at - job.times.created_at),
        duration_ns=max(0, _ns(end_at - begin_at)),
        facts=facts,
    )


def _take(trace: Trace, attempt: AttemptTimes, *, since_ns: int) -> None:
    """Add the spans of a worker to a trace, shifted by `since_ns`. Marks them as the worker's, not the gateway's."""
    reported = attempt.trace
    if reported.ByteSize() > _MAX_ATTEMPT_BYTES:
        trace.dropped += len(reported.spans)
        return
    trace.dropped += max(0, reported.dropped)
    for span in reported.spans:
        taken = trace.spans.add()
        taken.CopyFrom(span)
        taken.DiscardUnknownFields()
        taken.service = span.service or attempt.worker
        taken.begin_ns = span.begin_ns + since_ns


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _export_attempt(job: Job, name: str, spans: Iterable[Span]) -> None:
    """Export the spans of an attempt to OpenTelemetry as one trace, if that is enabled.

    Args:
        job: The job.
        name: Name of the attempt.
        spans: Spans of the attempt, counted from the job's acceptance.
    """
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
    # A root of its own: the current context may be that of another job, whose end freed the place of this one.
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
