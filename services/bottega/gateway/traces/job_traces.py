"""The traces of the jobs that ran last: the gateway's own spans, and what workers say of attempts, on one clock."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from bottega.gateway.jobs.job import Job
from bottega.gateway.traces.export import export_attempt
from bottega.v1.trace_pb2 import Trace

# Of one job, whose attempts may be many: what is more is dropped, and counted.
_MOST_SPANS = 4000
# Of a worker's trace, for which it answers alone.
_MOST_ATTEMPT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimes:
    """Of one attempt, on the gateway's monotonic clock. trace: of the worker, since it was sent."""

    number: int
    worker: str
    queued_at: float
    sent_at: float
    ended_at: float
    trace: Trace


class JobTraces:
    """In memory alone: a restarted gateway has none.

    budget_bytes: beyond it those go that were added to longest ago.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.size_bytes = 0
        self._budget_bytes = budget_bytes
        self._traces: OrderedDict[str, Trace] = OrderedDict()

    def find(self, job_id: str) -> Trace | None:
        """By beginnings; None where there is none."""
        return self._traces.get(job_id)

    def remove(self, job_id: str) -> None:
        """Forget the trace of a job, where there is one."""
        trace = self._traces.pop(job_id, None)
        if trace is not None:
            self.size_bytes -= trace.ByteSize()

    def add_attempt(self, job: Job, attempt: AttemptTimes) -> None:
        """An attempt at a job is over."""
        said = f"attempt {attempt.number}"
        made = Trace()
        _add(made, job, name="queue", track="jobs", begin_at=attempt.queued_at, end_at=attempt.sent_at)
        facts = {"worker": attempt.worker}
        _add(made, job, name=said, track="attempts", begin_at=attempt.sent_at, end_at=attempt.ended_at, facts=facts)
        _take(made, attempt, since_ns=_ns(attempt.sent_at - job.times.created_at))
        export_attempt(job, said, made.spans)
        before = self._traces.pop(job.job_id, None)
        if before is not None:
            self.size_bytes -= before.ByteSize()
        trace = before or _accepted(job)
        trace.spans.extend(made.spans)
        trace.dropped += made.dropped
        trace.spans.sort(key=lambda span: span.begin_ns)
        if len(trace.spans) > _MOST_SPANS:
            trace.dropped += len(trace.spans) - _MOST_SPANS
            del trace.spans[_MOST_SPANS:]
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
    """One of the gateway's own."""
    trace.spans.add(
        name=name,
        track=track,
        begin_ns=_ns(begin_at - job.times.created_at),
        duration_ns=max(0, _ns(end_at - begin_at)),
        facts=facts,
    )


def _take(trace: Trace, attempt: AttemptTimes, *, since_ns: int) -> None:
    """The worker's, which has no say in what is the gateway's. since_ns: when it got the attempt."""
    said = attempt.trace
    if said.ByteSize() > _MOST_ATTEMPT_BYTES:
        trace.dropped += len(said.spans)
        return
    trace.dropped += max(0, said.dropped)
    for span in said.spans:
        taken = trace.spans.add()
        taken.CopyFrom(span)
        taken.DiscardUnknownFields()
        taken.service = span.service or attempt.worker
        taken.begin_ns = span.begin_ns + since_ns


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
