"""Attempts at a worker: what followers see, how long results are kept, their traces, and what is reported at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bottega.errors import JobCancelled, QueueFull, StaleAttempt
from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.fleet_pb2 import RunningAttempt, StepTime
from bottega.v1.generation_pb2 import SAMPLER_EULER, SAMPLER_HEUN, GenerationSpec, Provenance
from bottega.v1.image_pb2 import Model, SamplerChoice
from bottega.v1.trace_pb2 import Trace
from bottega.worker.attempt_runner import evaluations_expected
from bottega.worker.attempts import (
    Attempt,
    AttemptCheckpoint,
    AttemptKey,
    Attempts,
    AttemptState,
    CheckpointWatch,
    CompletedEvent,
    Event,
    FailedEvent,
    KeptEvent,
    PictureEvent,
    ProgressEvent,
    StartedEvent,
)
from bottega.worker.engine_client import reported_at_once
from tests.fakes.fake_time import FakeTime
from tests.samples.hosted_loras import at_hand

KEY = AttemptKey(job_id="job", number=1)
STARTED = StartedEvent(steps_total=10, steps_resumed=0)


@pytest.fixture
def clock() -> FakeTime:
    return FakeTime()


@pytest.fixture
def attempts(clock: FakeTime) -> Attempts:
    return Attempts(max_attempts=2, result_grace_s=10, result_bytes=100, clock=clock.monotonic)


def held(attempts: Attempts, job_id: str, number: int = 1) -> Attempt:
    return attempts.add(AttemptKey(job_id=job_id, number=number))


async def told(stream: AsyncIterator[Event]) -> Event:
    return await asyncio.wait_for(anext(stream), 1)


async def test_a_follower_is_told_everything_in_order() -> None:
    attempt = Attempt(KEY)
    stream = attempt.follow()
    attempt.start(STARTED)
    assert await told(stream) == STARTED
    attempt.advance(ProgressEvent(steps_done=3))
    assert await told(stream) == ProgressEvent(steps_done=3)
    attempt.add_picture(PictureEvent(index=0, data=b"png"))
    assert await told(stream) == PictureEvent(index=0, data=b"png")
    attempt.complete(Provenance(worker="w"), Trace())
    assert await told(stream) == CompletedEvent(provenance=Provenance(worker="w"))
    with pytest.raises(StopAsyncIteration):
        await told(stream)
    assert attempt.fetched


async def test_what_is_kept_of_pictures_is_told_before_the_end_and_counts_as_they_do() -> None:
    attempt = Attempt(KEY)
    kept = KeptEvent(index=0, data=b"latents")
    attempt.add_kept(kept)
    attempt.add_picture(PictureEvent(index=0, data=b"png"))
    assert attempt.size_bytes == 10
    attempt.complete(Provenance(), Trace())
    events = [event async for event in attempt.follow()]
    assert events == [PictureEvent(index=0, data=b"png"), kept, CompletedEvent(provenance=Provenance())]
    failed = Attempt(KEY)
    failed.add_kept(kept)
    failed.fail(JobCancelled("enough"), Trace())
    assert failed.size_bytes == 0


async def test_a_slow_follower_is_told_only_the_newest_progress() -> None:
    attempt = Attempt(KEY)
    attempt.start(STARTED)
    stream = attempt.follow()
    assert await told(stream) == STARTED
    for step in (1, 2, 3):
        attempt.advance(ProgressEvent(steps_done=step))
    assert await told(stream) == ProgressEvent(steps_done=3)
    attempt.advance(ProgressEvent(steps_done=2))  # older than what is known
    assert attempt.steps_done == 3
    attempt.advance(ProgressEvent(steps_done=4))
    assert await told(stream) == ProgressEvent(steps_done=4)


async def test_a_second_follower_starts_from_the_current_state() -> None:
    attempt = Attempt(KEY)
    attempt.start(STARTED)
    attempt.advance(ProgressEvent(steps_done=9))
    attempt.add_picture(PictureEvent(index=0, data=b"png"))
    first = attempt.follow()
    assert await told(first) == STARTED
    await first.aclose()  # type: ignore[attr-defined]
    assert not attempt.fetched
    attempt.complete(Provenance(), Trace())
    events = [event async for event in attempt.follow()]
    assert events == [
        STARTED,
        ProgressEvent(steps_done=9),
        PictureEvent(index=0, data=b"png"),
        CompletedEvent(provenance=Provenance()),
    ]


async def test_what_comes_after_the_end_changes_nothing() -> None:
    attempt = Attempt(KEY)
    attempt.add_picture(PictureEvent(index=0, data=b"png"))
    error = JobCancelled("enough")
    attempt.fail(error, Trace())
    attempt.start(STARTED)
    attempt.advance(ProgressEvent(steps_done=1))
    attempt.add_picture(PictureEvent(index=0, data=b"late"))
    attempt.complete(Provenance(), Trace())
    assert attempt.state is AttemptState.FAILED
    assert [event async for event in attempt.follow()] == [FailedEvent(error=error)]


def test_a_later_attempt_of_a_job_supersedes_the_earlier(attempts: Attempts) -> None:
    first = held(attempts, "job", 1)
    second = AttemptKey(job_id="job", number=2)
    assert attempts.find(second) is None
    assert attempts.superseded(second) is first
    held(attempts, "job", 2)
    assert attempts.find(KEY) is None
    with pytest.raises(StaleAttempt):
        attempts.superseded(KEY)
    assert [attempt.key for attempt in attempts] == [second]


def test_only_so_many_are_held_that_have_not_ended(attempts: Attempts) -> None:
    first = held(attempts, "a")
    held(attempts, "b")
    with pytest.raises(QueueFull):
        held(attempts, "c")
    first.complete(Provenance(), Trace())
    held(attempts, "c")


def test_results_are_forgotten_after_their_grace(attempts: Attempts, clock: FakeTime) -> None:
    ended, running = held(attempts, "a"), held(attempts, "b")
    ended.complete(Provenance(), Trace())
    clock.now += 9
    attempts.sweep()
    assert list(attempts) == [ended, running]
    clock.now += 2
    attempts.sweep()
    assert list(attempts) == [running]


def test_beyond_the_bytes_what_was_fetched_goes_first_then_the_oldest(attempts: Attempts, clock: FakeTime) -> None:
    ended = []
    for job_id in "abc":
        attempt = held(attempts, job_id)
        attempt.add_picture(PictureEvent(index=0, data=bytes(40)))
        attempt.complete(Provenance(), Trace())
        clock.now += 1
        ended.append(attempt)
    ended[1].fetched = True
    attempts.sweep()
    assert list(attempts) == [ended[0], ended[2]]
    last = held(attempts, "d")
    last.add_picture(PictureEvent(index=0, data=bytes(90)))
    last.complete(Provenance(), Trace())
    attempts.sweep()
    assert list(attempts) == [last]


async def test_a_newer_checkpoint_replaces_an_unsent_one() -> None:
    board = CheckpointWatch()
    other = AttemptKey(job_id="other", number=1)

    def checkpoint(key: AttemptKey, step: int) -> AttemptCheckpoint:
        return AttemptCheckpoint(key=key, steps_done=step, data=b"")

    for step in (1, 2, 3):
        board.put(checkpoint(KEY, step))
    board.put(checkpoint(other, 1))
    stream = board.watch()
    assert await asyncio.wait_for(anext(stream), 1) == checkpoint(KEY, 3)
    board.put(checkpoint(other, 2))
    assert await asyncio.wait_for(anext(stream), 1) == checkpoint(other, 2)
    board.put(checkpoint(KEY, 4))
    board.drop(KEY)
    board.put(checkpoint(other, 3))
    assert await asyncio.wait_for(anext(stream), 1) == checkpoint(other, 3)
    board.close()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(stream), 1)


def _beat(*, steps_left: int = 9, seconds: float = 0.1, rows: int = 2, loras: tuple[str, ...] = ()) -> EngineBeat:
    times = [StepTime(latent_height=8, latent_width=8, rows=rows, seconds=seconds)]
    return EngineBeat(running=[RunningAttempt(steps_left=steps_left)], step_times=times, hosted=at_hand(*loras))


def test_steps_and_drifting_times_wait_for_the_regular_report() -> None:
    assert reported_at_once(_beat()) == reported_at_once(_beat(steps_left=3, seconds=0.2))


def test_a_width_that_was_measured_or_a_lora_that_came_is_told_at_once() -> None:
    assert reported_at_once(_beat()) != reported_at_once(_beat(rows=4))
    assert reported_at_once(_beat()) != reported_at_once(_beat(loras=("a" * 64,)))
    assert reported_at_once(EngineBeat()) != reported_at_once(_beat())


def test_an_attempt_that_has_not_begun_is_reported_with_the_evaluations_of_its_sampler() -> None:
    model = Model(sampler_choices=[SamplerChoice(sampler=SAMPLER_HEUN, evaluations_per_step=2, extra_evaluations=-1)])
    heun, euler = (
        GenerationSpec(sampler=sampler, num_inference_steps=10, num_images=2, image=b"x", strength=0.5)
        for sampler in (SAMPLER_HEUN, SAMPLER_EULER)
    )
    assert (evaluations_expected(heun, model), evaluations_expected(euler, model)) == (2 * 9, 2 * 5)
    assert evaluations_expected(heun, None) == 2 * 5
    assert evaluations_expected(euler, Model(strength_keeps_steps=True)) == 2 * 10
