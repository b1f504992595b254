"""The states of a job, its fencing numbers, and the bounded log that remembers jobs."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

import pytest

from bottega.errors import InternalError, InvalidRequest, JobCancelled, JobNotFound
from bottega.gateway.clock import Clock
from bottega.gateway.job_log import Filter, JobLog
from bottega.gateway.jobs import Checkpoint, Job, Picture, Standing
from bottega.gateway.results import ResultStore
from bottega.gateway.watching import Drawing, Ended, Event, Watch
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Provenance


@dataclass
class FakeTime:
    now: float = 1000.0

    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.now, wall=lambda: self.now + 1e9)


def _job(time: FakeTime | None = None, *, request_id: str = "", images: int = 1) -> Job:
    spec = GenerationSpec(model="m", num_inference_steps=10, num_images=images, image=b"input")
    bare = GenerationSpec(model="m", num_inference_steps=10, num_images=images)
    clock = (time or FakeTime()).clock()
    return Job(clock=clock, spec=spec, bare=bare, shape=(16, 16), fingerprint="f", request_id=request_id)


def test_a_job_runs_from_the_queue_to_its_pictures() -> None:
    time = FakeTime()
    job = _job(time)
    assert (job.state, job.steps_total) == (image_pb2.JOB_STATE_QUEUED, 10)
    time.now += 2
    assert job.begin("w1") == 1
    assert (job.state, job.queue_s, job.worker) == (image_pb2.JOB_STATE_RUNNING, 2.0, "w1")
    assert job.resume(1, steps_total=10, steps_resumed=0)
    assert job.advance(1, 4)
    time.now += 3
    assert job.complete(1, (Picture(digest="d", size_bytes=1),), Provenance())
    assert (job.state, job.steps_done, job.ended_wall) == (image_pb2.JOB_STATE_COMPLETED, 10, time.now + 1e9)
    assert job.ended.is_set()


def test_an_ended_job_lets_its_input_images_and_checkpoint_go() -> None:
    job = _job()
    job.begin("w1")
    job.keep(1, Checkpoint(steps_done=3, data=b"c"))
    job.look(1, 0, b"jpeg")
    job.fail(InternalError("x"))
    assert (job.spec.image, job.checkpoint, job.previews) == (b"", None, {})


def test_late_answers_of_an_abandoned_attempt_change_nothing() -> None:
    job = _job()
    first = job.begin("w1")
    job.advance(first, 6)
    assert job.requeue(first)
    second = job.begin("w2")
    assert second == first + 1
    late = [
        job.resume(first, steps_total=1, steps_resumed=1),
        job.advance(first, 9),
        job.look(first, 0, b"late"),
        job.keep(first, Checkpoint(steps_done=9, data=b"late")),
        job.requeue(first),
        job.complete(first, (Picture(digest="late", size_bytes=1),), Provenance()),
        job.fail(InternalError("late"), first),
    ]
    assert late == [False] * len(late)
    assert (job.state, job.steps_done, job.checkpoint, job.pictures) == (image_pb2.JOB_STATE_RUNNING, 6, None, ())


def test_steps_that_run_again_are_counted() -> None:
    job = _job()
    job.begin("w1")
    job.advance(1, 7)
    job.requeue(1)
    job.begin("w2")
    job.resume(2, steps_total=10, steps_resumed=4)
    assert (job.repeated_steps, job.steps_done) == (3, 4)


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
def test_an_ended_job_stays_as_it_is(end: str) -> None:
    job = _job()
    job.begin("w1")
    match end:
        case "complete":
            job.complete(1, (), Provenance())
        case "fail":
            job.fail(InternalError("x"))
        case _:
            job.cancel()
    state, error = job.state, job.error
    assert not job.cancel()
    assert not job.fail(InternalError("y"))
    assert not job.complete(1, (), Provenance())
    assert not job.requeue(1)
    assert (job.state, job.error) == (state, error)


def test_a_cancelled_job_says_so() -> None:
    job = _job()
    job.cancel()
    assert job.state == image_pb2.JOB_STATE_CANCELLED
    assert isinstance(job.error, JobCancelled)


def test_previews_of_no_image_of_the_job_are_ignored() -> None:
    job = _job()
    job.begin("w1")
    assert not job.look(1, 1, b"x")
    assert not job.look(1, -1, b"x")


def _log(time: FakeTime, *, max_jobs: int = 100, budget_bytes: int = 1 << 30, ttl_s: float = 60) -> JobLog:
    return JobLog(max_jobs=max_jobs, budget_bytes=budget_bytes, ttl_s=ttl_s, clock=time.clock())


def _ended(log: JobLog, time: FakeTime, request_id: str = "") -> Job:
    job = _job(time, request_id=request_id)
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
    live = _job(time)
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
    live = _job(time)
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
    newer = _job(time, request_id="r")
    log.add(newer)
    log.sweep()
    assert log.of_request("r") is newer


def test_results_are_bounded_in_bytes_and_time() -> None:
    time = FakeTime()
    store = ResultStore(budget_bytes=10, ttl_s=60, clock=time.clock())
    store.put("a", b"12345")
    time.now += 30
    store.put("b", b"12345")
    store.put("c", b"1")
    assert (store.get("a"), store.get("b"), store.get("c")) == (None, b"12345", b"1")
    store.put("d", b"x" * 11)
    assert store.get("d") is None
    time.now += 61
    assert store.get("b") is None
    store.sweep()
    assert store.size_bytes == 0


async def _next(watch: object) -> Event:
    event: Event = await asyncio.wait_for(anext(watch), 2)  # type: ignore[call-overload]
    return event


async def test_a_watch_begins_with_the_current_state_and_ends_with_the_job() -> None:
    job = _job()
    job.stand(Standing(place=3, estimate_s=None))
    watch = Watch(job).events()
    assert await _next(watch) == Standing(place=3, estimate_s=None)
    job.begin("w1")
    job.advance(1, 2)
    assert await _next(watch) == Drawing(steps_done=2, steps_total=10, previews={})
    job.cancel()
    assert isinstance(await _next(watch), Ended)
    await watch.aclose()
    assert [event async for event in Watch(job).events()] == [Ended()]
    assert job.listeners == set()


async def test_a_slow_watcher_gets_the_newest_state_and_none_of_what_it_missed() -> None:
    job = _job()
    job.begin("w1")
    watch = Watch(job, preview=True).events()
    await _next(watch)
    for step in range(1, 10):
        job.advance(1, step)
        job.look(1, 0, b"preview %d" % step)
    assert await _next(watch) == Drawing(steps_done=9, steps_total=10, previews={0: b"preview 9"})
    await watch.aclose()


async def test_progress_comes_at_most_ten_times_a_second_and_the_end_at_once() -> None:
    job = _job()
    job.begin("w1")
    watch = Watch(job).events()
    clock = asyncio.get_running_loop().time

    async def draw() -> float:
        for step in range(1, 10):
            job.advance(1, step)
            await asyncio.sleep(0.03)
        job.complete(1, (), Provenance())
        return clock()

    drawing = asyncio.create_task(draw())
    told = [(clock(), event) async for event in watch]
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(told[:-1])]
    assert all(gap >= 0.099 for gap in gaps)
    assert isinstance(told[-1][1], Ended)
    assert told[-1][0] - await drawing < 0.05


async def test_previews_go_only_to_those_who_asked() -> None:
    job = _job()
    job.begin("w1")
    job.look(1, 0, b"jpeg")
    event = await _next(Watch(job).events())
    assert event == Drawing(steps_done=0, steps_total=10, previews={})
