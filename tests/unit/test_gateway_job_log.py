"""The bounded log that remembers jobs: its pages, its filters and what it forgets."""

from __future__ import annotations

import pytest

from bottega.errors import InvalidRequest, JobNotFound
from bottega.gateway.job_log import Filter, JobLog
from bottega.gateway.jobs import Job
from bottega.v1 import image_pb2
from tests.unit.sample_jobs import FakeTime, sample_job


def _log(time: FakeTime, *, max_jobs: int = 100, budget_bytes: int = 1 << 30, ttl_s: float = 60) -> JobLog:
    return JobLog(max_jobs=max_jobs, budget_bytes=budget_bytes, ttl_s=ttl_s, clock=time.clock())


def _ended(log: JobLog, time: FakeTime, request_id: str = "") -> Job:
    job = sample_job(time, request_id=request_id)
    log.add(job)
    job.cancel()
    log.ended(job)
    return job


def test_the_log_pages_newest_first_even_while_jobs_come_in() -> None:
    time = FakeTime()
    log = _log(time)
    jobs = [_ended(log, time) for _ in range(5)]
    first, token = log.page(Filter(), size=2, token="")
    _ended(log, time)
    second, token = log.page(Filter(), size=2, token=token)
    third, end = log.page(Filter(), size=2, token=token)
    assert [*first, *second, *third] == list(reversed(jobs))
    assert end == ""


def test_the_log_filters_by_state_and_time() -> None:
    time = FakeTime()
    log = _log(time)
    old = _ended(log, time)
    time.now += 10
    live = sample_job(time)
    log.add(live)
    assert log.page(Filter(states={image_pb2.JOB_STATE_QUEUED}), size=9, token="")[0] == [live]
    assert log.page(Filter(before=live.created_wall), size=9, token="")[0] == [old]
    assert log.page(Filter(after=live.created_wall), size=9, token="")[0] == [live]


@pytest.mark.parametrize("token", ["x", "AAAA", "%%%", "ü", "A" * 1000])
def test_a_made_up_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest):
        _log(FakeTime()).page(Filter(), size=1, token=token)


def test_ended_jobs_are_forgotten_after_their_time_and_live_ones_never() -> None:
    time = FakeTime()
    log = _log(time, ttl_s=60)
    live = sample_job(time)
    log.add(live)
    job = _ended(log, time, request_id="r")
    time.now += 59
    log.sweep()
    assert log.of_request("r") is job
    time.now += 2
    log.sweep()
    assert log.of_request("r") is None
    with pytest.raises(JobNotFound):
        log.get(job.job_id)
    assert log.get(live.job_id) is live


def test_the_log_is_bounded_in_number_and_bytes() -> None:
    time = FakeTime()
    by_number = _log(time, max_jobs=3)
    jobs = [_ended(by_number, time) for _ in range(5)]
    assert [by_number.find(job.job_id) is not None for job in jobs] == [False, False, True, True, True]
    by_bytes = _log(time, budget_bytes=10_000)
    for _ in range(10):
        _ended(by_bytes, time)
    assert by_bytes.size_bytes <= 10_000


def test_a_forgotten_job_does_not_take_a_newer_one_of_its_request_id_along() -> None:
    time = FakeTime()
    log = _log(time, max_jobs=1)
    _ended(log, time, request_id="r")
    newer = sample_job(time, request_id="r")
    log.add(newer)
    log.sweep()
    assert log.of_request("r") is newer
