"""The bounded queue of waiting jobs: its order, its room and when to ask again."""

from __future__ import annotations

import pytest

from bottega.errors import QueueFull
from bottega.gateway.queueing import JobQueue
from tests.unit.sample_jobs import FakeTime, sample_job


def test_the_queue_is_bounded_in_number_and_bytes() -> None:
    time = FakeTime()
    queue = JobQueue(max_jobs=2, budget_bytes=2000, clock=time.clock())
    queue.add(sample_job(time, size_bytes=920))
    with pytest.raises(QueueFull):
        queue.check_room(1500)
    queue.check_room(500)
    second = sample_job(time, size_bytes=30)
    queue.add(second)
    with pytest.raises(QueueFull):
        queue.check_room(1)
    queue.remove(second)
    queue.check_room(500)
    queue.remove(second)


def test_a_lost_job_goes_before_the_others() -> None:
    time = FakeTime()
    queue = JobQueue(max_jobs=9, budget_bytes=1 << 20, clock=time.clock())
    jobs = [sample_job(time, size_bytes=30) for _ in range(3)]
    queue.add(jobs[0])
    queue.add(jobs[1])
    queue.add(jobs[2], first=True)
    assert list(queue.line("m")) == [jobs[2], jobs[0], jobs[1]]


def test_retry_after_follows_the_measured_rate() -> None:
    time = FakeTime()
    queue = JobQueue(max_jobs=100, budget_bytes=1 << 20, clock=time.clock())
    for _ in range(100):
        queue.add(sample_job(time, size_bytes=30))
    for _ in range(10):
        queue.one_done()
        time.now += 2.0
    # One job in two seconds, and a tenth of the queue is ten jobs. Not everybody shall come back at once.
    told = [queue.retry_after_s() for _ in range(100)]
    assert min(told) == pytest.approx(20, rel=0.1)
    assert max(told) == pytest.approx(30, rel=0.1)
    assert len(set(told)) > 50
