"""What those who follow a job are told, and how often."""

from __future__ import annotations

import asyncio

import pytest

from bottega.errors import Draining
from bottega.gateway.api.watching import EndedEvent, JobWatch, RunningEvent, WatchEvent
from bottega.gateway.jobs.values import QueuePosition
from bottega.v1.generation_pb2 import Provenance
from tests.samples.jobs import publish_end, sample_job


async def _next(watch: object) -> WatchEvent:
    event: WatchEvent = await asyncio.wait_for(anext(watch), 2)  # type: ignore[call-overload]
    return event


async def test_a_watch_begins_with_the_current_state_and_ends_with_the_job() -> None:
    job = sample_job()
    job.set_queue_position(3)
    watch = JobWatch(job).events()
    assert await _next(watch) == QueuePosition(place=3, estimate_s=None)
    job.start_attempt("w1")
    job.set_steps_done(1, 2)
    assert await _next(watch) == RunningEvent(steps_done=2, steps_total=10, previews={})
    job.cancel()
    publish_end(job)
    assert isinstance(await _next(watch), EndedEvent)
    await watch.aclose()
    assert [event async for event in JobWatch(job).events()] == [EndedEvent()]
    assert job.listeners == set()


async def test_a_slow_watcher_gets_the_newest_state_and_none_of_what_it_missed() -> None:
    job = sample_job()
    job.start_attempt("w1")
    watch = JobWatch(job, preview=True).events()
    await _next(watch)
    for step in range(1, 10):
        job.set_steps_done(1, step)
        job.set_preview(1, 0, b"preview %d" % step)
    assert await _next(watch) == RunningEvent(steps_done=9, steps_total=10, previews={0: b"preview 9"})
    job.set_steps_done(1, 10)
    assert await _next(watch) == RunningEvent(steps_done=10, steps_total=10, previews={}), "a preview is told once"
    await watch.aclose()


async def test_progress_comes_at_most_ten_times_a_second_and_the_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, passed_s = asyncio.get_running_loop(), 0.0
    began_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: began_s + passed_s)
    job, told = sample_job(), list[WatchEvent]()
    job.start_attempt("w1")

    async def watch() -> None:
        async for event in JobWatch(job).events():
            told.append(event)

    watching = asyncio.create_task(watch())
    for step, passed_s, count in ((0, 0.0, 1), (1, 0.01, 1), (2, 0.09, 1), (3, 0.11, 2), (4, 0.2, 2)):
        job.set_steps_done(1, step)
        for _ in range(9):
            await asyncio.sleep(0)
        assert len(told) == count, passed_s
    job.complete(1, (), Provenance())
    publish_end(job)
    for _ in range(9):
        await asyncio.sleep(0)
    assert told[1:] == [RunningEvent(steps_done=3, steps_total=10, previews={}), EndedEvent()]
    await watching


async def test_previews_go_only_to_those_who_asked() -> None:
    job = sample_job()
    job.start_attempt("w1")
    job.set_preview(1, 0, b"jpeg")
    event = await _next(JobWatch(job).events())
    assert event == RunningEvent(steps_done=0, steps_total=10, previews={})


async def test_those_who_follow_a_job_that_goes_on_elsewhere_are_sent_away() -> None:
    job = sample_job()
    watch = JobWatch(job).events()
    waiting = asyncio.create_task(_next(watch))
    await asyncio.sleep(0)
    job.detach(Draining("the gateway is stopping"))
    with pytest.raises(Draining):
        await waiting
    assert job.live
