"""The traces that a gateway keeps: on one clock, bounded, and believing a worker no more than its own part."""

from __future__ import annotations

from bottega.gateway.dispatch.job_traces import AttemptTimes, JobTraces
from bottega.gateway.jobs.job import Job
from bottega.v1.trace_pb2 import Span, Trace
from tests.fakes.fake_time import FakeTime
from tests.samples.jobs import sample_job

BUDGET = 1 << 20


def attempt(job: Job, number: int = 1, *, sent_s: float = 2.0, spans: int = 1, dropped: int = 0) -> AttemptTimes:
    """Queued with the job, sent so long after it, ended a second later. Its worker says so many spans."""
    created = job.times.created_at
    said = [Span(name=f"step {step}", track="denoise", begin_ns=step * 1000, duration_ns=500) for step in range(spans)]
    return AttemptTimes(
        number=number,
        worker="w0",
        queued_at=created + 0.5,
        sent_at=created + sent_s,
        ended_at=created + sent_s + 1.0,
        trace=Trace(spans=said, dropped=dropped),
    )


def said(trace: Trace | None) -> list[tuple[str, str, str, float, float]]:
    assert trace is not None
    return [(span.service, span.track, span.name, span.begin_ns / 1e9, span.duration_ns / 1e9) for span in trace.spans]


def test_what_a_worker_says_is_counted_from_when_it_got_the_attempt() -> None:
    traces, job = JobTraces(BUDGET), sample_job(FakeTime())
    traces.add_attempt(job, attempt(job, spans=2))
    assert said(traces.find(job.job_id)) == [
        ("", "jobs", "store the job", 0.0, 0.0),
        ("", "jobs", "queue", 0.5, 1.5),
        ("", "attempts", "attempt 1", 2.0, 1.0),
        ("w0", "denoise", "step 0", 2.0, 5e-7),
        ("w0", "denoise", "step 1", 2.000001, 5e-7),
    ]


def test_a_later_attempt_is_added_to_the_earlier_one() -> None:
    traces, job = JobTraces(BUDGET), sample_job(FakeTime())
    traces.add_attempt(job, attempt(job, dropped=1))
    traces.add_attempt(job, attempt(job, 2, sent_s=4.0, dropped=2))
    trace = traces.find(job.job_id)
    assert trace is not None
    assert trace.dropped == 3
    assert [span.name for span in trace.spans if span.track == "attempts"] == ["attempt 1", "attempt 2"]
    assert [span.begin_ns for span in trace.spans] == sorted(span.begin_ns for span in trace.spans)


def test_beyond_the_budget_those_go_that_were_added_to_longest_ago() -> None:
    jobs = [sample_job(FakeTime()) for _ in range(4)]
    traces = JobTraces(BUDGET)
    traces.add_attempt(jobs[0], attempt(jobs[0], spans=50))
    traces = JobTraces(round(2.5 * traces.size_bytes))
    for job in (*jobs[:2], jobs[0], *jobs[2:3]):
        traces.add_attempt(job, attempt(job, spans=50))
    assert [traces.find(job.job_id) is not None for job in jobs] == [False, False, True, False]
    traces.add_attempt(jobs[3], attempt(jobs[3], spans=50))
    assert [traces.find(job.job_id) is not None for job in jobs] == [False, False, True, True]
    kept = [traces.find(job.job_id) for job in jobs]
    assert traces.size_bytes == sum(trace.ByteSize() for trace in kept if trace is not None)


def test_a_worker_that_says_too_much_is_cut_short() -> None:
    traces, job = JobTraces(64 * BUDGET), sample_job(FakeTime())
    traces.add_attempt(job, attempt(job, spans=5000))
    trace = traces.find(job.job_id)
    assert trace is not None
    assert (len(trace.spans), trace.dropped) == (4000, 1003)
    other = sample_job(FakeTime())
    endless = attempt(other)
    endless.trace.spans[0].name = "x" * (2 << 20)
    traces.add_attempt(other, endless)
    trace = traces.find(other.job_id)
    assert trace is not None
    assert (len(trace.spans), trace.dropped) == (3, 1)
    assert trace.ByteSize() < 1000


def test_a_worker_cannot_speak_for_the_gateway() -> None:
    traces, job = JobTraces(BUDGET), sample_job(FakeTime())
    one = attempt(job)
    one.trace.spans.add(name="residuals", service="nets", track="ControlNet edges")
    traces.add_attempt(job, one)
    assert [span.service for span in traces.find(job.job_id).spans] == ["", "", "", "w0", "nets"]  # type: ignore[union-attr]
