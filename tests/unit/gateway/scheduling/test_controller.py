"""From accepted to ended by the gateway's rules, without a wire and on a clock that the test turns."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from dataclasses import dataclass

import pytest

from bottega.addons.interface.gateway_addon import AddOn, JobCosts, WorkerCosts
from bottega.addons.interface.views import MAX_ATTEMPTS, AddOnJob
from bottega.errors import (
    BottegaError,
    DeadlineUnmeetable,
    Draining,
    InternalError,
    NoWorker,
    Poisoned,
    QueueFull,
    Unavailable,
    WorkerLost,
)
from bottega.gateway.jobs.job import Job
from bottega.gateway.tenants import TenantTerms
from bottega.rpc.security.tenant_file import UNBOUNDED, Quotas
from bottega.v1 import fleet_pb2, image_pb2, worker_pb2
from tests.fakes.gateway_rules import Shop
from tests.samples.jobs import sample_job
from tests.support.job_store_backends import queued
from tests.support.waiting import eventually


def _calling_takes(shop: Shop, seconds: float) -> None:
    def pass_time() -> None:
        shop.time.now += seconds

    for client in shop.clients.values():
        client.on_call = pass_time


async def test_routing_is_timed_from_a_free_worker_to_its_call(shop: Shop) -> None:
    shop.worker()
    _calling_takes(shop, 0.25)
    first = shop.submit()
    assert (first.times.queue_s, first.times.route_s) == (0, 0.25)
    waits = shop.submit()
    assert waits.state == image_pb2.JOB_STATE_QUEUED
    shop.time.now += 10
    await shop.complete(first)
    assert waits.state == image_pb2.JOB_STATE_RUNNING
    assert (waits.times.queue_s, waits.times.route_s) == (10, 0.25)
    assert shop.registry.get_sample_value("bottega_queue_seconds_sum") == 10
    assert shop.registry.get_sample_value("bottega_route_seconds_sum") == 0.5


async def test_the_next_job_is_bound_when_the_one_before_comes_to_its_last_turn(shop: Shop) -> None:
    shop.worker()
    first, waits = shop.submit(), shop.submit()
    shop.time.now += 1
    await shop.advance(first, 5)
    assert waits.state == image_pb2.JOB_STATE_QUEUED
    shop.time.now += 1
    await shop.advance(first, 9)
    assert waits.state == image_pb2.JOB_STATE_RUNNING


async def test_news_that_came_during_the_pause_after_a_look_count_when_it_is_over(shop: Shop) -> None:
    shop.worker()
    first, waits = shop.submit(), shop.submit()
    await shop.advance(first, 9)  # the queue was looked at at this very moment of the clock
    await eventually(lambda: waits.state == image_pb2.JOB_STATE_RUNNING)


@pytest.mark.parametrize("ends", ["completed", "cancelled", "failed"])
async def test_a_job_that_used_more_than_was_expected_counts_for_its_tenant_however_it_ends(
    shop: Shop, ends: str
) -> None:
    shop.worker()
    first = shop.take(sample_job(shop.time, tenant="heavy"))
    await shop.advance(first, 1)  # nothing is measured yet
    for _ in range(10):
        for tenant in ("heavy", "light"):
            shop.take(sample_job(shop.time, tenant=tenant))
    expected_s = 0.1 * first.rows * first.steps.total
    if ends == "completed":
        await shop.complete(first, device_s=6.5 * expected_s)
    else:
        await shop.advance(first, 5, device_s=6.5 * expected_s)
        if ends == "cancelled":
            shop.controller.cancel(first)
        else:
            await shop.fail(first, InternalError("it cannot be drawn"))
    # Another of its jobs begins beside one of the other tenant, as each has one that runs, and is charged, too.
    open_jobs = [job for job in shop.log.live() if job.open]
    running = Counter(job.request.tenant for job in open_jobs if job.state == image_pb2.JOB_STATE_RUNNING)
    assert running == {"heavy": 1, "light": 1}
    waiting = [job.request.tenant for job in shop.controller.queue.line("m")]
    assert 1 + waiting.index("heavy") == 8, "as many of the other tenant's come first as take as long as both"


@pytest.mark.parametrize(
    ("steps_done", "waited_s", "charged_s"),
    [(0, 0.3, 0.3), (0, 9.0, 0.5), (10, 0.2, 2.2), (10, 9.0, 2.5)],
    ids=["while it is encoded", "after its encoding", "while it is decoded", "after its decoding"],
)
async def test_a_cancelled_job_is_charged_for_encoding_and_decoding(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, steps_done: int, waited_s: float, charged_s: float
) -> None:
    settled: list[float | None] = []
    worker = shop.worker()
    shop.report(worker, beside_s=0.5)
    job = shop.submit()
    if steps_done:
        await shop.advance(job, steps_done, device_s=2.0)
    shop.time.now += waited_s
    monkeypatch.setattr(shop.queue, "settle", lambda job, device_s: settled.append(device_s))
    shop.controller.cancel(job)
    assert settled == [pytest.approx(charged_s)]


async def test_every_new_look_sees_how_far_the_workers_are(shop: Shop) -> None:
    shop.worker("w1")
    shop.worker("w2")
    one, other = shop.submit(), shop.submit()
    third, fourth = shop.submit(), shop.submit()
    shop.time.now += 1
    await shop.advance(other, 9)
    assert (third.worker, fourth.state) == (other.worker, image_pb2.JOB_STATE_QUEUED)
    shop.time.now += 1
    await shop.complete(one)
    assert fourth.worker == "w1"


async def test_old_step_times_are_not_kept_alive(shop: Shop) -> None:
    member = shop.worker()
    for _ in range(3):
        shop.submit()
    old = weakref.ref(member.times)
    shop.report(member)
    await shop.controller.estimates.publish_all()  # those who wait are told how it looks now
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("end", ["cancel", "fail"])
async def test_a_job_that_brought_no_picture_keeps_its_steps_and_its_trace(shop: Shop, end: str) -> None:
    shop.worker()
    job = shop.submit()
    shop.time.now += 2
    await shop.advance(job, 4)
    if end == "cancel":
        shop.controller.cancel(job)
    else:
        await shop.fail(job, InternalError("a fault"))
    await job.ended.wait()
    assert job.steps.done == 4
    trace = shop.controller.traces.find(job.job_id)
    assert trace is not None
    (attempt,) = [span for span in trace.spans if span.name == "attempt 1"]
    assert attempt.duration_ns == 2_000_000_000


async def test_of_an_attempt_that_was_stopped_nothing_waits_for_the_collector(shop: Shop) -> None:
    shop.worker()
    job = shop.submit()
    await shop.advance(job, 1)
    task = weakref.ref(shop.dispatcher._attempts[job.job_id].task)
    gc.disable()  # what waits for it is kept
    try:
        shop.controller.cancel(job)
        await eventually(lambda: task() is None)
    finally:
        gc.enable()


async def test_those_who_line_up_are_told_their_place_and_when_they_will_be_done(shop: Shop) -> None:
    shop.worker()
    shop.submit()
    waiting = [shop.submit() for _ in range(3)]
    for place, job in enumerate(waiting):
        assert job.queue_position is not None
        assert job.queue_position.place == place
        assert job.queue_position.estimate_s == pytest.approx((2 + place) * 10 * 0.1)


async def test_a_short_job_is_not_refused_for_long_ones_that_it_goes_before(shop: Shop) -> None:
    shop.worker()  # .1 s a turn
    shop.submit()
    long = [shop.take(sample_job(shop.time, steps=100)) for _ in range(3)]
    short = sample_job(shop.time, steps=5)
    short.deadline = shop.time.now + 3.0
    shop.controller.estimates.check_deadline(short)
    shop.take(short)
    assert short.queue_position is not None
    assert short.queue_position.place == 0
    assert short.queue_position.estimate_s == pytest.approx(5 * 2 * 0.1), "beside the one that runs"
    last = shop.take(sample_job(shop.time, steps=100))
    assert last.queue_position is not None
    assert last.queue_position.place == 4
    assert last.queue_position.estimate_s == pytest.approx(1.0 + 0.5 + 4 * 10.0), "behind all of them"
    assert [job.live for job in long] == [True] * 3


async def test_a_short_job_begins_beside_a_long_one_that_is_not_late_by_it(shop: Shop) -> None:
    shop.worker()  # .1 s a turn, and .2 s for two jobs
    long = shop.take(sample_job(shop.time, steps=100))
    assert long.due_s == pytest.approx(20.0)
    short = shop.take(sample_job(shop.time, steps=10))
    await eventually(lambda: short.worker == "w1", "the short one to begin")
    shop.time.now += 25.0
    shop.report(shop.member("w1"))
    waits = shop.take(sample_job(shop.time, steps=10))
    assert (waits.worker, waits.queue_position is not None) == ("", True)


async def test_a_job_whose_caller_goes_is_cancelled_before_its_deadline_and_failed_by_it(shop: Shop) -> None:
    for after_s, state in ((1.0, image_pb2.JOB_STATE_CANCELLED), (1.95, image_pb2.JOB_STATE_FAILED)):
        job = sample_job(shop.time)
        job.deadline = shop.time.now + 2
        shop.take(job)
        shop.time.now += after_s
        shop.controller.abandon(job)
        await job.ended.wait()
        assert job.state == state


def _due(shop: Shop, in_s: float) -> Job:
    job = sample_job(shop.time)
    job.deadline = shop.time.now + in_s
    return job


async def test_a_job_that_cannot_end_before_its_deadline_is_refused_with_the_estimate(shop: Shop) -> None:
    shop.worker()  # .1 s a turn, ten of them
    shop.controller.estimates.check_deadline(_due(shop, 1.1))
    with pytest.raises(DeadlineUnmeetable) as refused:
        shop.controller.estimates.check_deadline(_due(shop, 0.8))
    assert float(refused.value.metadata["estimate_s"]) == pytest.approx(1.0)
    assert refused.value.retry_after_s is None  # alone it would be too late as well
    for _ in range(3):
        shop.submit()
    shop.time.now += 0.1
    with pytest.raises(DeadlineUnmeetable) as refused:
        shop.controller.estimates.check_deadline(_due(shop, 3.0))
    assert float(refused.value.metadata["estimate_s"]) == pytest.approx(4.0)
    assert refused.value.retry_after_s
    with pytest.raises(DeadlineUnmeetable):
        shop.controller.estimates.check_deadline(_due(shop, 4.6))  # nothing to spare, behind others
    shop.controller.estimates.check_deadline(_due(shop, 6.0))


async def test_nobody_is_refused_for_those_gone_or_for_what_was_not_measured(shop: Shop) -> None:
    shop.controller.estimates.check_deadline(_due(shop, 0.1))
    worker = shop.worker()
    shop.fleet.report(worker, fleet_pb2.Load())
    shop.time.now += 1
    shop.controller.estimates.check_deadline(_due(shop, 0.1))
    shop.report(worker)
    jobs = [shop.submit() for _ in range(3)]
    for job in jobs:
        shop.controller.cancel(job)
    shop.time.now += 0.1
    shop.controller.estimates.check_deadline(_due(shop, 1.2))


async def test_a_job_that_waits_too_long_to_be_done_in_time_is_dropped_before_its_deadline(shop: Shop) -> None:
    shop.worker()
    runs = shop.submit()
    late, other = _due(shop, 5.0), shop.submit()
    shop.take(late)
    shop.start()
    shop.time.now += 4.3
    shop.report(shop.member("w1"))
    await late.ended.wait()
    assert isinstance(late.error, DeadlineUnmeetable)
    assert (runs.live, other.live) == (True, True)


async def test_a_job_whose_turn_comes_too_late_is_not_begun_while_others_wait(shop: Shop) -> None:
    shop.worker()
    runs = shop.submit()
    late = shop.take(_due(shop, 5.0))
    waits = shop.submit()
    shop.time.now += 4.1  # a second is left, which is what it takes alone, and nobody knows who joins it
    shop.report(shop.member("w1"))
    await shop.complete(runs)
    await late.ended.wait()
    assert isinstance(late.error, DeadlineUnmeetable)
    assert waits.worker == "w1"


@dataclass(frozen=True)
class _Loads(AddOn):
    """Something that every job has to load first."""

    load_s: float

    def costs(self, job: AddOnJob) -> JobCosts:
        return JobCosts(key=self.load_s, at=lambda workers: WorkerCosts(load_s=dict.fromkeys(workers, self.load_s)))


@pytest.mark.parametrize(("loads_s", "begins"), [((0.1,), True), ((0.25, 0.35), False)])
async def test_a_job_that_has_to_load_for_too_long_is_not_begun_while_others_wait(
    loads_s: tuple[float, ...], begins: bool
) -> None:
    shop = Shop(addons=[_Loads(load_s) for load_s in loads_s])
    shop.worker()
    runs = shop.submit()
    due = shop.take(_due(shop, 5.0))
    shop.submit()
    shop.time.now += 3.5  # alone its turns take a second of what is left, and others may join it
    shop.report(shop.member("w1"))
    await shop.complete(runs)
    assert (due.worker == "w1", isinstance(due.error, DeadlineUnmeetable)) == (begins, not begins)
    await shop.stop()


class _OneAtOnce(TenantTerms):
    """The tenant "bounded" may run one job at once."""

    def quotas(self, tenant: str) -> Quotas:
        return Quotas(concurrent=1) if tenant == "bounded" else UNBOUNDED


async def test_no_more_of_a_tenant_runs_at_once_and_nobody_waits_for_what_it_has_waiting() -> None:
    shop = Shop(terms=_OneAtOnce())
    for name in ("w1", "w2", "w3"):
        shop.worker(name)
    first, second, third = (shop.take(sample_job(shop.time, tenant="bounded")) for _ in range(3))
    other = shop.take(sample_job(shop.time, tenant="other"))
    for job, waits in ((first, [second, third]), (second, [third]), (third, [])):
        running = [each for each in shop.log.live() if each.state == image_pb2.JOB_STATE_RUNNING]
        assert set(running) == {job, other}
        assert all(each.state == image_pb2.JOB_STATE_QUEUED for each in waits)
        await shop.complete(job)
        shop.time.now += 1.0  # the next look
        shop.report(shop.member("w1"))
    await shop.stop()


async def test_a_worker_that_was_frozen_is_told_to_stop_what_is_drawn_elsewhere(shop: Shop) -> None:
    shop.worker("w1")
    job = shop.submit()
    shop.time.now += 60.0
    shop.fleet.expire()
    again = shop.worker("w2")
    await eventually(lambda: job.worker == "w2")
    woken = shop.worker("w1")
    assert job.number == 2
    for member, number in ((woken, 1), (again, 2)):
        attempt = worker_pb2.AttemptId(job_id=job.job_id, number=number)
        shop.fleet.report(member, fleet_pb2.Load(running=[fleet_pb2.RunningAttempt(attempt=attempt, steps_left=5)]))
    await eventually(lambda: any(client.stopped for client in shop.clients.values()))
    assert [client.stopped for client in shop.clients.values()] == [[], [], [(job.job_id, 1)]]


async def test_workers_that_stop_or_are_full_are_not_counted_as_lost_with_a_job() -> None:
    shop = Shop(max_attempts=1)
    job = shop.submit()
    for name in ("w1", "w2", "w3"):
        member = shop.worker(name)
        assert job.worker == name
        shop.report(member, draining=True)
        await shop.fail(job, WorkerLost("cut off"))
    for name, error in (("w4", QueueFull("full")), ("w5", Draining("stops")), ("w6", Unavailable("refused"))):
        shop.worker(name)
        assert job.worker == name
        await shop.fail(job, error)
        assert job.state == image_pb2.JOB_STATE_QUEUED
    shop.worker("w7")
    await shop.fail(job, WorkerLost("cut off"))
    assert (job.state, job.attempts) == (image_pb2.JOB_STATE_FAILED, 7)
    assert isinstance(job.error, WorkerLost)
    await shop.stop()


def _near_its_last_attempt(shop: Shop) -> Job:
    """As after all attempts but one that a job may have, in the second life of a gateway."""
    job = sample_job(shop.time)
    job.life = 1
    job.number = (1 << 12) + MAX_ATTEMPTS - 1
    return shop.take(job)


@pytest.mark.parametrize("error", [WorkerLost("cut off"), QueueFull("full")], ids=["lost", "returned"])
async def test_the_count_of_attempts_never_runs_into_that_of_lives(error: BottegaError) -> None:
    shop = Shop(max_attempts=MAX_ATTEMPTS)
    job = _near_its_last_attempt(shop)
    shop.worker()
    assert (job.number, job.attempts) == ((2 << 12) - 1, MAX_ATTEMPTS)
    await shop.fail(job, error)
    await job.ended.wait()
    assert isinstance(job.error, WorkerLost)
    assert job.error.message == "4095 attempts at this job failed"
    await shop.stop()


@pytest.mark.parametrize("lost", [False, True], ids=["unclaimed", "in the queue"])
async def test_a_restart_gives_no_job_more_attempts_than_there_are_numbers(lost: bool) -> None:
    shop = Shop(max_attempts=MAX_ATTEMPTS, hold_s=0.01)
    job = _near_its_last_attempt(shop)
    shop.worker()
    await shop.stop()
    if lost:  # and the gateway died before it could write what follows from that
        assert await shop.storage.jobs.update(job.job_id, queued(job.number, deaths=0))
    shop.open()
    (again,) = shop.log.live()
    await again.ended.wait()
    assert (again.state, again.number) == (image_pb2.JOB_STATE_FAILED, (2 << 12) - 1)
    await shop.stop()


async def test_a_gateway_that_was_stopped_itself_waits_for_the_workers_of_its_jobs_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, stopped_s = asyncio.get_running_loop(), 0.0
    running_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: running_s() + stopped_s)
    shop = Shop(hold_s=30.0)
    shop.worker()
    job = shop.submit()
    await shop.stop()
    shop.open()
    (held,) = shop.log.live()
    stopped_s = 60.0  # as by SIGSTOP: no worker could come meanwhile
    for _ in range(3):
        await asyncio.sleep(0)
    assert (held.job_id, held.state) == (job.job_id, image_pb2.JOB_STATE_RUNNING), "it is held"
    while held.state == image_pb2.JOB_STATE_RUNNING:
        assert stopped_s < 120.0
        stopped_s += 0.2
        await asyncio.sleep(0)
    assert stopped_s > 85.0
    await shop.stop()


async def test_a_gateway_that_was_stopped_between_two_looks_ends_no_lease(shop: Shop) -> None:
    looks: list[None] = []

    def stopped_in_it() -> None:
        looks.append(None)
        if len(looks) == 1:
            shop.time.now += 60  # wherever in the look that happens

    shop.worker()
    shop.periodic._check_queue = stopped_in_it  # type: ignore[method-assign]
    shop.start()
    await eventually(lambda: len(looks) >= 2)
    assert [member.name for member in shop.fleet.members()] == ["w1"]


async def test_a_gateway_whose_members_report_is_not_woken_before_a_lease_could_end(shop: Shop) -> None:
    looks: list[float] = []
    expire = shop.fleet.expire

    def looked() -> None:
        looks.append(shop.fleet.shortest_lease_s())
        expire()

    worker, began = shop.worker(), shop.time.now
    shop.fleet.expire = looked  # type: ignore[method-assign]
    shop.start()
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    async with asyncio.timeout(30):
        while len(looks) < 3:
            await asyncio.sleep(0.05)
            shop.time.now = began + loop.time() - started_s
            if shop.fleet.shortest_lease_s() <= shop.fleet.lease_s - 0.5:
                shop.report(worker)
    assert shop.time.now - began > 1.2, "and not three tenths of a second"


async def test_telling_a_long_queue_where_it_stands_keeps_no_silent_worker_in_the_fleet(shop: Shop) -> None:
    entered = asyncio.Event()

    async def without_end() -> None:
        entered.set()
        await asyncio.Event().wait()

    shop.worker()
    shop.controller.estimates.publish_all = without_end  # type: ignore[method-assign]
    shop.start()
    await asyncio.wait_for(entered.wait(), 5)
    async with asyncio.timeout(30):
        while shop.fleet.members():
            shop.time.now += 0.05
            await asyncio.sleep(0.05)
    await shop.stop()


async def test_a_poison_pill_fails_alone_and_none_of_its_neighbours(shop: Shop) -> None:
    """A worker that dies whenever the poison pill has come to its fourth step."""
    worker = shop.worker(seconds=0.1)
    shop.report(worker, seconds=0.1, fixed_s=10.0)  # turns that are nearly free to share: all run together
    jobs = [shop.submit() for _ in range(8)]
    pill = jobs[3]
    assert len(shop.running(worker)) == 8
    company: list[int] = []
    for _ in range(200):
        if not any(job.live for job in jobs):
            break
        shop.time.now += 0.3
        shop.report(worker, seconds=0.1, fixed_s=10.0)
        await shop.step(worker)
        if pill.state == image_pb2.JOB_STATE_RUNNING and pill.steps.done >= 4:
            company.append(len(shop.running(worker)))
            await shop.kill(worker)
    assert isinstance(pill.error, Poisoned)
    assert company == [8, 1, 1]
    assert [job.state for job in jobs if job is not pill] == [image_pb2.JOB_STATE_COMPLETED] * 7


async def test_quarantined_jobs_hold_up_nobody_at_another_worker(shop: Shop) -> None:
    first = shop.worker("w1")
    dies = shop.submit()
    assert dies.worker == "w1"
    shop.worker("w2")
    runs = shop.submit()
    await shop.kill(first)
    assert (dies.state, dies.quarantined) == (image_pb2.JOB_STATE_QUEUED, True)
    later = shop.submit()
    assert (later.worker, dies.state) == ("w1", image_pb2.JOB_STATE_QUEUED)
    await shop.complete(runs)
    shop.report(shop.member("w2"))
    assert (dies.worker, dies.exclusive) == ("w2", True)
    waits = shop.submit()
    assert waits.state == image_pb2.JOB_STATE_QUEUED
    await shop.complete(dies)
    shop.report(shop.member("w2"))
    assert waits.worker == "w2"


async def test_a_worker_that_did_not_take_a_job_is_not_asked_again_at_once(shop: Shop) -> None:
    member = shop.worker()
    job = shop.submit()
    await shop.fail(job, QueueFull("full"))
    shop.time.now += 0.4
    other = shop.submit()
    assert len(shop.client().called) == 1
    shop.time.now += 0.2
    shop.report(member)
    assert (job.state, other.state) == (image_pb2.JOB_STATE_RUNNING, image_pb2.JOB_STATE_QUEUED)


async def test_a_job_that_no_worker_takes_fails_in_the_end(shop: Shop) -> None:
    member = shop.worker()
    job = shop.submit()
    began = shop.time.now
    while job.live:
        await shop.fail(job, QueueFull("full"))
        shop.time.now += 0.5
        shop.report(member)
    assert 20 < shop.time.now - began < 60
    assert isinstance(job.error, NoWorker)


async def test_a_fault_while_the_queue_is_looked_after_is_logged_told_and_ends_no_lease(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bottega.gateway.periodic_checks._TICK_S", 0.005)
    monkeypatch.setattr("bottega.gateway.periodic_checks._QUEUE_S", 0.005)
    shop.worker()
    unknown = sample_job(shop.time)
    shop.queue.add(unknown)  # nobody knows of it, which is a fault of ours
    shop.start()
    async with asyncio.timeout(5):
        while shop.periodic.healthy:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    logged = [line.exc_info is not None for line in caplog.records if line.levelname == "ERROR"]
    assert len(logged) >= 3
    assert all(logged)
    shop.queue.remove(unknown)
    async with asyncio.timeout(5):
        while shop.fleet.members() or not shop.periodic.healthy:
            shop.time.now += 0.2  # its lease ends, and the faults are long ago
            await asyncio.sleep(0.01)


async def test_a_fault_in_the_stream_of_checkpoints_is_logged_and_they_are_watched_again(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.worker()
    job = shop.submit()
    shop.client().news.put_nowait(None)
    attempt = worker_pb2.AttemptId(job_id=job.job_id, number=job.number)
    news = worker_pb2.WatchCheckpointsResponse(attempt=attempt, steps_done=4, checkpoint=b"4")
    shop.client().news.put_nowait(news)
    await eventually(lambda: job.checkpoint is not None and job.checkpoint.steps_done == 4)
    assert [line.levelname for line in caplog.records if line.exc_info] == ["ERROR"]
