"""What a gateway says of the times of a job: its own part, over all attempts, and when there is nothing to say."""

from __future__ import annotations

from bottega import errors
from bottega.v1 import image_pb2
from bottega.v1.trace_pb2 import Trace
from tests.support.running_gateway import Running, refusal
from tests.support.waiting import eventually


async def trace_of(house: Running, job_id: str) -> Trace:
    return (await house.images.GetJobTrace(image_pb2.GetJobTraceRequest(job_id=job_id))).trace


async def test_a_trace_begins_with_the_jobs_acceptance_and_has_its_wait_and_its_attempt(house: Running) -> None:
    await house.worker()
    job = await house.submit(prompt="a star")
    await house.ended(job.job_id)
    spans = {span.name: span for span in (await trace_of(house, job.job_id)).spans}
    assert list(spans) == ["store the job", "queue", "attempt 1"]
    assert spans["store the job"].begin_ns == 0
    queue, attempt = spans["queue"], spans["attempt 1"]
    assert 0 <= queue.begin_ns <= queue.begin_ns + queue.duration_ns <= attempt.begin_ns + 10**6
    assert (attempt.track, dict(attempt.facts)) == ("attempts", {"worker": "w1"})
    assert attempt.duration_ns > 0


async def test_there_is_none_of_a_job_that_nobody_has_or_that_runs_for_the_first_time(house: Running) -> None:
    worker = await house.worker(hold_at=3)
    job = await house.submit(prompt="a star")
    await refusal(lambda: trace_of(house, "nobody's"), errors.JobNotFound)
    error = await refusal(lambda: trace_of(house, job.job_id), errors.TraceNotFound)
    assert error.message == "no attempt at the job has ended yet"
    worker.script.release.set()
    await house.ended(job.job_id)
    assert (await trace_of(house, job.job_id)).spans


async def test_an_attempt_whose_worker_died_stays_in_the_trace(house: Running) -> None:
    worker = await house.worker("lost", hold_at=3)
    job = await house.submit(prompt="a star")
    await eventually(lambda: bool(worker.requests))
    await worker.die()
    await house.worker("other")
    await house.ended(job.job_id)
    spans = (await trace_of(house, job.job_id)).spans
    attempts = [(span.name, span.facts["worker"]) for span in spans if span.track == "attempts"]
    assert attempts == [("attempt 1", "lost"), ("attempt 2", "other")]
    assert [span.name for span in spans].count("queue") == 2
