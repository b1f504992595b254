"""The states of a job and its fencing numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bottega.errors import InternalError, JobCancelled
from bottega.gateway.jobs.conversion import change_of, job_of, record_of
from bottega.gateway.jobs.store import EndTime
from bottega.gateway.jobs.values import JobCheckpoint, StoredImage
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import Provenance
from tests.fakes.fake_time import FakeTime
from tests.samples.jobs import publish_end, sample_job


def test_a_job_runs_from_the_queue_to_its_pictures() -> None:
    time = FakeTime()
    job = sample_job(time)
    assert (job.state, job.steps.total) == (image_pb2.JOB_STATE_QUEUED, 10)
    time.now += 2
    assert job.start_attempt("w1") == 1
    assert (job.state, job.times.queue_s, job.worker) == (image_pb2.JOB_STATE_RUNNING, 2.0, "w1")
    assert job.start_denoising(1, steps_total=10, steps_resumed=0)
    assert job.set_steps_done(1, 4)
    time.now += 3
    assert job.complete(1, (StoredImage(digest="d", size_bytes=1),), Provenance())
    assert job.state == image_pb2.JOB_STATE_RUNNING
    publish_end(job)
    assert (job.state, job.steps.done, job.ended_wall) == (image_pb2.JOB_STATE_COMPLETED, 10, time.now + 1e9)
    assert job.ended.is_set()


@pytest.mark.parametrize("end", ["fail", "cancel"])
def test_a_job_that_brought_no_picture_keeps_how_far_it_was(end: str) -> None:
    job = sample_job()
    record = record_of(job, steady=0.0)
    job.start_attempt("w1")
    job.set_steps_done(1, 4)
    assert job.fail(InternalError("x")) if end == "fail" else job.cancel()
    publish_end(job)
    assert (job.steps.done, job.steps.total) == (4, 10)
    assert job.outcome is not None
    change = change_of(job.outcome, number=1, bare=job.bare, tenant="", end=EndTime(wall=1.0, steady=1.0))
    ended = change(record)
    assert ended is not None
    again = job_of(ended, life=2, clock=FakeTime().clock(), steady=2.0)
    assert (again.state, again.steps.done) == (job.state, 4), "another life of the gateway knows it, too"


def test_an_ended_job_lets_its_input_images_and_checkpoint_go() -> None:
    job = sample_job()
    job.start_attempt("w1")
    job.set_checkpoint(1, JobCheckpoint(steps_done=3, data=b"c"))
    job.set_preview(1, 0, b"jpeg")
    job.fail(InternalError("x"))
    assert (job.spec.image, job.checkpoint, job.previews) == (b"", None, {})


def test_late_answers_of_an_abandoned_attempt_change_nothing() -> None:
    job = sample_job()
    first = job.start_attempt("w1")
    job.set_steps_done(first, 6)
    assert job.requeue_lost(first)
    second = job.start_attempt("w2")
    assert second == first + 1
    late = [
        job.start_denoising(first, steps_total=1, steps_resumed=1),
        job.set_steps_done(first, 9),
        job.set_preview(first, 0, b"late"),
        job.set_checkpoint(first, JobCheckpoint(steps_done=9, data=b"late")),
        job.requeue_lost(first),
        job.complete(first, (StoredImage(digest="late", size_bytes=1),), Provenance()),
        job.fail(InternalError("late"), first),
    ]
    assert late == [False] * len(late)
    assert (job.state, job.steps.done, job.checkpoint, job.images) == (image_pb2.JOB_STATE_RUNNING, 6, None, ())


def test_steps_that_run_again_are_counted() -> None:
    job = sample_job()
    job.start_attempt("w1")
    job.set_steps_done(1, 7)
    job.requeue_lost(1)
    job.start_attempt("w2")
    job.start_denoising(2, steps_total=10, steps_resumed=4)
    assert (job.steps.repeated, job.steps.done) == (3, 4)


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
def test_an_ended_job_stays_as_it_is(end: str) -> None:
    job = sample_job()
    job.start_attempt("w1")
    ends: dict[str, Callable[[], bool]] = {
        "complete": lambda: job.complete(1, (), Provenance()),
        "fail": lambda: job.fail(InternalError("x")),
        "cancel": job.cancel,
    }
    assert ends[end]()
    outcome = job.outcome
    for told in (False, True):
        assert not any(other() for other in ends.values())
        assert not job.requeue_lost(1)
        assert not job.adopt_attempt("w2", 7)
        assert (job.outcome, job.live) == (outcome, not told)
        publish_end(job)
    assert isinstance(job.error, JobCancelled) == (end == "cancel")


def test_a_death_counts_against_a_job_only_where_it_was_alone() -> None:
    job = sample_job()
    job.start_attempt("w1")
    job.requeue_lost(1, died=True)
    assert (job.losses.deaths, job.losses.beside_others) == (0, 1)
    job.start_attempt("w1", exclusive=True)
    job.mark_shared()
    job.requeue_lost(2, died=True)
    job.start_attempt("w1", exclusive=True)
    job.requeue_lost(3, died=True, exclusive=False)
    assert (job.losses.deaths, job.losses.beside_others) == (0, 3)
    job.start_attempt("w1", exclusive=True)
    job.requeue_lost(4, died=True)
    assert (job.losses.deaths, job.losses.beside_others) == (1, 3)


def test_a_job_is_quarantined_until_it_is_further_than_it_was_and_the_second_time_to_its_end() -> None:
    job, was = sample_job(), []
    job.start_attempt("w1")
    job.set_steps_done(1, 4)
    job.requeue_lost(1)  # a cut-off is not held against it
    was.append(job.quarantined)
    job.start_attempt("w1")
    job.requeue_lost(2, died=True)
    was.append(job.quarantined)
    job.start_attempt("w1", exclusive=True)
    job.start_denoising(3, steps_total=10, steps_resumed=2)
    job.set_steps_done(3, 4)
    was.append(job.quarantined)
    job.set_steps_done(3, 5)
    was.append(job.quarantined)
    job.requeue_lost(3, died=True)
    job.start_attempt("w1", exclusive=True)
    job.set_steps_done(4, 10)
    was.append(job.quarantined)
    assert was == [False, True, True, False, True]


def test_previews_of_no_image_of_the_job_are_ignored() -> None:
    job = sample_job()
    job.start_attempt("w1")
    assert not job.set_preview(1, 1, b"x")
    assert not job.set_preview(1, -1, b"x")


def test_an_attempt_of_a_later_life_has_a_higher_number_whatever_was_not_written() -> None:
    job = sample_job()
    for _ in range(5):
        job.requeue_returned(job.start_attempt("w1"))
    later = sample_job()
    later.life, later.number = 1, 2  # the store knows of two attempts
    assert later.start_attempt("w1") > job.number
    assert later.attempts == 3
    assert job.attempts == 5


def test_a_worker_brings_an_attempt_back_unless_a_later_one_is_known() -> None:
    job = sample_job()
    number = job.start_attempt("w1")
    assert not job.adopt_attempt("w2", number - 1)
    assert job.adopt_attempt("w2", number)
    assert (job.worker, job.is_current(number), job.attempts) == ("w2", True, 1)
