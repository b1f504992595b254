"""The bounded queue of waiting jobs: its order, its room and when to ask again."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.errors import QueueFull
from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.line import DuePolicy
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.worker_plan import ResourceRequest
from bottega.gateway.tenants import TenantTerms
from bottega.v1.image_pb2 import PRIORITY_HIGH, PRIORITY_LOW, PRIORITY_NORMAL, Priority
from tests.fakes.fake_time import FakeTime
from tests.samples.jobs import sample_job


def _queue(time: FakeTime, *, max_jobs: int = 99, **options: Any) -> JobQueue:
    return JobQueue(max_jobs=max_jobs, budget_bytes=1 << 20, clock=time.clock(), **options)


@pytest.fixture
def queue(time: FakeTime) -> JobQueue:
    return _queue(time)


def test_the_queue_is_bounded_in_number_and_bytes(time: FakeTime) -> None:
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


def test_a_tenant_that_floods_leaves_places_and_bytes_to_others(time: FakeTime) -> None:
    queue = _queue(time, max_jobs=100)
    flood = [sample_job(time, tenant="flood") for _ in range(75)]
    for job in flood:
        queue.reserve(job)
        queue.add(job)
    assert queue.held("flood") == 75
    with pytest.raises(QueueFull, match="the remaining places are for other tenants"):
        queue.reserve(sample_job(time, tenant="flood"))
    for _ in range(15):
        queue.add(sample_job(time, tenant="one"))
    queue.check_room(1, tenant="other")
    for job in flood:
        queue.remove(job)
        queue.remove(job)
    assert queue.held("flood") == 0
    for _ in range(99 - len(queue)):  # who has no name has all
        queue.add(sample_job(time))
    queue.check_room(1)
    small = JobQueue(max_jobs=100, budget_bytes=1000, clock=time.clock())
    for _ in range(7):
        small.reserve(sample_job(time, tenant="flood", size_bytes=100))
    with pytest.raises(QueueFull, match="the remaining places are for other tenants"):
        small.reserve(sample_job(time, tenant="flood", size_bytes=100))
    small.check_room(200, tenant="one")


class _Terms(TenantTerms):
    """Terms of tenants of which one has three times the weight of others."""

    def weight(self, tenant: str) -> float:
        return 3.0 if tenant == "one" else 1.0


def test_tenants_take_turns_by_weight_however_many_jobs_each_has(time: FakeTime) -> None:
    queue = _queue(time, terms=_Terms())
    for tenant in ("other", "one"):
        for _ in range(40):
            queue.add(sample_job(time, tenant=tenant))
    served = [job.request.tenant for job in queue.line("m")][:40]
    assert 29 <= served.count("one") <= 31
    assert queue.waiting("m") == 80


def test_who_asks_for_little_is_behind_few_of_who_asks_for_much_and_is_told_so(time: FakeTime, queue: JobQueue) -> None:
    flood = [sample_job(time, tenant="flood") for _ in range(50)]
    for job in flood:
        queue.add(job)
    for job in flood[:10]:
        queue.begin(job)
    victim = sample_job(time, tenant="victim")
    assert list(queue.before(victim)) == [], "it has had nothing yet"
    queue.add(victim)
    second = sample_job(time, tenant="victim")
    assert list(queue.before(second)) == [victim, flood[10]]
    queue.add(second)
    assert (queue.place(victim), queue.place(second)) == (0, 2)
    late = sample_job(time, tenant="flood")
    assert len(queue.before(late)) == 42
    queue.add(late, first=True)
    assert (queue.place(late), queue.place(victim), queue.place(second)) == (0, 1, 3)


def test_tenants_share_seconds_of_devices_whatever_was_expected(time: FakeTime) -> None:
    """Jobs of one are longer, and those of another take longer than expected, as those with unmeasured ControlNets."""
    used_s = Counter[str]()
    slower = {"heavy": 1.0, "light": 1.0, "liar": 16.0}
    queue = _queue(time, max_jobs=9999, sizes=_Sizes(1.0))
    for tenant, steps in {"heavy": 160, "light": 10, "liar": 10}.items():
        for _ in range(1600):
            queue.add(sample_job(time, tenant=tenant, steps=steps))
    running: deque[Job] = deque()
    while len(queue.tenants("m")) == len(slower):
        job = next(queue.line("m"))
        queue.begin(job)
        running.append(job)
        if len(running) > 2:
            ended = running.popleft()
            took_s = ended.steps.total * slower[ended.request.tenant]
            used_s[ended.request.tenant] += int(took_s)
            queue.settle(ended, took_s)
    assert [seconds / used_s.total() for seconds in used_s.values()] == pytest.approx([1 / 3] * 3, abs=0.02)


def test_jobs_that_are_cancelled_or_returned_before_they_used_anything_cost_nothing(
    time: FakeTime, queue: JobQueue
) -> None:
    queue.add(sample_job(time, tenant="other"))
    for _ in range(20):
        gone, returned = sample_job(time, tenant="one"), sample_job(time, tenant="one")
        queue.add(gone)
        queue.add(returned)
        queue.remove(gone)
        queue.begin(returned)
        queue.settle(returned, 0.0)
    queue.add(last := sample_job(time, tenant="one"))
    assert queue.place(last) == 0 or next(queue.line("m")).request.tenant == "other"
    queue.add(second := sample_job(time, tenant="other"))
    assert queue.place(second) == 2, "of each tenant one is before it"


def _urgency(time: FakeTime, step_s: float = 0.1) -> tuple[JobQueue, _Sizes, Callable[..., Job]]:
    """A queue whose head start is a minute, and what adds a job to it, due three times what it takes after it came."""
    sizes = _Sizes(step_s)
    queue = _queue(time, max_jobs=999, due=DuePolicy(slo_scale=3.0, head_start_s=60.0), sizes=sizes)

    def add(priority: Priority.ValueType = PRIORITY_NORMAL, tenant: str = "", steps: int = 10) -> Job:
        job = sample_job(time, tenant=tenant, priority=priority, steps=steps)
        place = len(queue.before(job))
        queue.add(job)
        assert queue.place(job) == place, "what it was told before it came"
        return job

    return queue, sizes, add


def test_a_job_of_high_priority_is_before_others_of_its_tenant_and_one_of_low_priority_behind(time: FakeTime) -> None:
    queue, _, add = _urgency(time)
    low, normal, high, second = add(PRIORITY_LOW), add(), add(PRIORITY_HIGH), add(PRIORITY_HIGH)
    assert list(queue.line("m")) == [high, second, normal, low]
    queue.remove(second)
    lost = add()
    queue.remove(lost)
    queue.add(lost, first=True)
    assert list(queue.line("m")) == [lost, high, normal, low]


def test_jobs_age_so_that_none_is_passed_over_for_longer_than_the_head_start(time: FakeTime) -> None:
    queue, _, add = _urgency(time)
    low, normal = add(PRIORITY_LOW), add()
    time.now += 59.0
    hurried = add(PRIORITY_HIGH)
    time.now += 2.0
    late, later = add(PRIORITY_HIGH), add()
    assert list(queue.line("m")) == [hurried, normal, late, low, later]


def test_priorities_change_nothing_between_tenants(time: FakeTime) -> None:
    queue, _, add = _urgency(time)
    urgent = [add(PRIORITY_HIGH, "greedy") for _ in range(4)]
    patient = [add(PRIORITY_LOW, "patient") for _ in range(4)]
    assert list(queue.line("m")) == [job for pair in zip(urgent, patient, strict=True) for job in pair]
    urgent.insert(0, add(PRIORITY_HIGH, "greedy"))
    assert [job.request.tenant for job in queue.line("m")][:8] == ["greedy", "patient"] * 4


class _Sizes:
    """A step takes so long, whatever it is of; 0 until it is measured."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def resource_request(self, job: Job) -> ResourceRequest:
        return ResourceRequest(rows=job.rows, steps=job.steps.total, shape=job.request.shape)

    def alone_s(self, model: str, request: ResourceRequest) -> float:
        assert model == "m"
        return self.step_s * request.steps


def test_a_short_job_is_served_before_a_long_one_that_came_shortly_before_it(time: FakeTime) -> None:
    queue, _, add = _urgency(time)
    long, short, middle = add(steps=100), add(steps=10), add(steps=50)
    assert list(queue.line("m")) == [short, middle, long]
    time.now += 26.0
    late = add(steps=10)
    time.now += 2.0
    later = add(steps=10)
    assert list(queue.line("m")) == [short, middle, late, long, later], "the long one is due 30 s after it came"
    assert (long.due_s, later.due_s) == pytest.approx((2.0, 3.0))


def test_jobs_of_one_length_are_served_in_the_order_in_which_they_came_whatever_is_measured_meanwhile(
    time: FakeTime,
) -> None:
    queue, sizes, add = _urgency(time, step_s=0.0)
    jobs = []
    for sizes.step_s in (0.0, 0.4, 0.2, 0.1):
        jobs.append(add(steps=20))
        time.now += 1.0
    assert list(queue.line("m")) == jobs
    for job in jobs:
        queue.remove(job)
    sizes.step_s = 0.01
    assert queue.waiting("m") == 0
    long, short = add(steps=20), add(steps=19)
    assert list(queue.line("m")) == [short, long]


def test_no_job_is_due_while_nothing_is_measured_nor_where_the_first_that_came_is_served_first(time: FakeTime) -> None:
    _, _, unmeasured = _urgency(time, step_s=0.0)
    due = DuePolicy(head_start_s=60.0)
    queue = _queue(time, due=due, sizes=_Sizes(0.1))
    queue.add(first := sample_job(time, steps=50))
    queue.add(second := sample_job(time, steps=10))
    assert list(queue.line("m")) == [first, second]
    assert {job.due_s for job in (unmeasured(), first, second)} == {math.inf}


def test_a_job_of_high_priority_is_served_earlier_however_long_it_is_and_due_as_others(time: FakeTime) -> None:
    queue, _, add = _urgency(time)
    short, long = add(steps=10), sample_job(time, steps=100, priority=PRIORITY_HIGH)
    queue.add(long)
    assert list(queue.line("m")) == [long, short]
    assert long.due_s == pytest.approx(30.0)


def test_a_long_job_with_a_deadline_is_due_by_that(time: FakeTime) -> None:
    queue, _, add = _urgency(time)
    for in_s, first in ((12.0, True), (31.0, False)):
        long = sample_job(time, steps=100)
        long.deadline = time.now + in_s
        queue.add(long)
        others = [add(steps=50)]
        assert list(queue.line("m")) == ([long, *others] if first else [*others, long])
        assert long.due_s == pytest.approx(min(in_s, 30.0))
        for job in (long, *others):
            queue.remove(job)


_MOVES = st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans(), st.floats(0, 40), st.integers(1, 200))


@settings(max_examples=50)
@given(st.lists(_MOVES, max_size=60))
def test_whatever_comes_and_goes_places_and_jobs_agree(moves: list[tuple[int, int, bool, float, int]]) -> None:
    time, here = FakeTime(), list[Job]()
    queue, _, add = _urgency(time)
    for priority, tenant, goes, seconds, steps in moves:
        time.now += seconds
        if goes and here:
            queue.remove(here.pop(int(seconds) % len(here)))
        else:
            here.append(add(Priority.values()[priority], f"t{tenant}", steps))
        line = list(queue.line("m"))
        assert sorted(job.job_id for job in line) == sorted(job.job_id for job in here)
        assert [queue.place(job) for job in line] == list(range(len(line)))
        assert all(list(queue.before(job)) == line[:place] for place, job in enumerate(line))
        for name in queue.tenants("m"):
            own = [job for job in line if job.request.tenant == name]
            assert own == sorted(own, key=_served_as_if_due)


def _served_as_if_due(job: Job) -> float:
    earlier = {PRIORITY_HIGH: 60.0, PRIORITY_LOW: -60.0}.get(job.request.priority, 0.0)
    return job.times.created_at - earlier + 3.0 * 0.1 * job.steps.total


def test_a_line_that_was_empty_owes_nobody_anything(time: FakeTime, queue: JobQueue) -> None:
    for _ in range(20):
        job = sample_job(time, tenant="busy")
        queue.add(job)
        queue.remove(job)
    jobs = [sample_job(time, tenant=tenant) for tenant in ("busy", "new", "busy", "new")]
    for job in jobs:
        queue.add(job)
    assert list(queue.line("m")) == jobs


def test_the_longest_wait_is_of_all_that_wait_whatever_their_place(time: FakeTime) -> None:
    queue = _queue(time, max_jobs=9)
    assert queue.longest_wait_s() == 0
    first = sample_job(time, size_bytes=30)
    queue.add(first)
    time.now += 5
    queue.add(sample_job(time, size_bytes=30), first=True)
    assert queue.longest_wait_s() == pytest.approx(5)
    queue.remove(first)
    assert queue.longest_wait_s() == pytest.approx(0)


def test_retry_after_follows_the_measured_rate() -> None:
    # One job in two seconds, and a tenth of the queue is ten jobs. Not everybody shall come back at once.
    _, queue = _drawn(100, every_s=2, pictures=10)
    told = [queue.retry_after_s() for _ in range(100)]
    assert min(told) == pytest.approx(20, rel=0.1)
    assert max(told) == pytest.approx(30, rel=0.1)
    assert len(set(told)) > 50


def _hint_s(queue: JobQueue) -> float:
    """The shortest that is told: some hear up to half as much more."""
    return min(queue.retry_after_s() for _ in range(200))


def _drawn(waiting: int, *, every_s: float, pictures: int = 6) -> tuple[FakeTime, JobQueue]:
    """So many jobs wait while pictures come at that rate; the last one has just come."""
    time = FakeTime()
    queue = _queue(time, max_jobs=1000)
    for _ in range(waiting):
        queue.add(sample_job(time, size_bytes=30))
    for _ in range(pictures):
        time.now += every_s
        queue.count_completed()
    return time, queue


@pytest.mark.parametrize(
    ("waiting", "every_s", "pictures", "hint_s"), [(10, 20, 6, 20), (256, 31, 2, 60), (256, 600, 40, 60)]
)
def test_the_slower_pictures_are_the_longer_are_callers_asked_to_wait(
    waiting: int, every_s: float, pictures: int, hint_s: float
) -> None:
    """For the time of a tenth of the queue, a minute at most."""
    time, queue = _drawn(waiting, every_s=every_s, pictures=pictures)
    assert _hint_s(queue) == pytest.approx(hint_s, rel=0.05)
    if waiting == 256:
        time.now += every_s / 2
        assert _hint_s(queue) == pytest.approx(hint_s, rel=0.05)


def test_the_time_in_which_nobody_waited_slows_no_rate() -> None:
    time, queue = _drawn(0, every_s=2)
    time.now += 3600
    for _ in range(10):
        queue.add(sample_job(time, size_bytes=30))
    for _ in range(3):
        assert _hint_s(queue) == pytest.approx(2, rel=0.05)
        time.now += 2
        queue.count_completed()


def test_a_fleet_that_has_stalled_promises_nothing_of_what_it_once_drew() -> None:
    time, queue = _drawn(10, every_s=1)
    told = [_hint_s(queue)]
    for _ in range(4):
        time.now += 30
        told.append(_hint_s(queue))
    assert told == sorted(told)
    assert told[0] == pytest.approx(1, rel=0.05)
    assert told[-1] > 25, "four pictures in two minutes are no rate of one a second"
