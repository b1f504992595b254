"""`bottega jobs` and `generate --detach` as people use them, against a gateway that follows a script."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from bottega.errors import JobNotFinished
from bottega.v1 import generation_pb2, image_pb2
from tests.fakes.scripted_gateway import SMALL, ScriptedGateway, completed, job, progress, queued
from tests.support.terminal import NO_UNICODE, run

pytestmark = pytest.mark.usefixtures("own_folder")


def running(done: int = 12) -> image_pb2.Job:
    found = job(image_pb2.JOB_STATE_RUNNING)
    found.ClearField("images")
    found.steps_done, found.steps_total = done, 30
    found.spec.prompt = "A big, red star!"
    return found


def test_a_detached_drawing_prints_the_id_and_says_how_to_have_the_picture(
    gateway: ScriptedGateway, address: str
) -> None:
    result = run("generate", "a star", "-n", "2", "--detach", "-o", "my star.png", address=address)
    assert result.exit_code == 0
    assert result.stdout == "job-1\n"
    assert "bottega jobs watch job-1" in result.stderr
    assert "bottega jobs get job-1 -o 'my star.png' --wait" in result.stderr
    assert gateway.submitted[0].spec.num_images == 2
    assert not gateway.submitted[0].HasField("deadline_s")
    assert run("generate", "a star", "--detach", "--timeout", "90", address=address).exit_code == 0
    assert round(gateway.submitted[1].deadline_s) == 90, "its own"
    assert not gateway.requests


def test_filters_and_pages_reach_the_gateway_and_come_again_on_the_next_page(
    gateway: ScriptedGateway, address: str
) -> None:
    options = "--state failed --state cancelled --since 2h --until 2026-01-03T10:30+00:00 -n 7 --page abc"
    before = datetime.now(UTC)
    result = run("jobs", *options.split(), address=address)
    created = datetime(2026, 1, 2, tzinfo=UTC).astimezone()
    for shown in ("job-1", "failed", f"{created:%Y-%m-%d %H:%M:%S}"):
        assert shown in result.stdout
    asked = gateway.listed[0]
    assert list(asked.states) == [image_pb2.JOB_STATE_FAILED, image_pb2.JOB_STATE_CANCELLED]
    assert (asked.page_size, asked.page_token) == (7, "abc")
    since = asked.created_after.ToDatetime(tzinfo=UTC)
    assert timedelta() <= since - (before - timedelta(hours=2)) < timedelta(hours=1)
    assert asked.created_before.ToDatetime(tzinfo=UTC) == datetime(2026, 1, 3, 10, 30, tzinfo=UTC)
    # What is said can be typed.
    again = result.stderr.removeprefix("More: bottega ").split()
    assert run(*again, address=address).exit_code == 0
    assert gateway.listed[1].page_token == "more"
    moved = gateway.listed[1].created_after.ToDatetime(tzinfo=UTC) - since
    assert abs(moved) < timedelta(milliseconds=1), "a page later, two hours ago is still the same moment"
    gateway.listed[1].created_after.CopyFrom(asked.created_after)
    gateway.listed[1].page_token = "abc"
    assert gateway.listed[1] == asked


def test_pages_without_jobs_are_turned_but_not_without_end(gateway: ScriptedGateway, address: str) -> None:
    def empty(*tokens: str) -> list[image_pb2.ListJobsResponse]:
        return [image_pb2.ListJobsResponse(next_page_token=token) for token in tokens]

    gateway.pages = empty("second", "third")
    result = run("jobs", "--state", "failed", "-n", "7", address=address)
    assert [asked.page_token for asked in gateway.listed] == ["", "second", "third"]
    assert {(asked.page_size, tuple(asked.states)) for asked in gateway.listed} == {(7, (image_pb2.JOB_STATE_FAILED,))}
    assert ("job-1" in result.stdout, result.stderr.endswith("--page more\n")) == (True, True)
    gateway.pages = empty("second", "")
    result = run("jobs", address=address)
    assert (result.stdout, result.stderr) == ("", "There are no such jobs.\n")
    gateway.listed.clear()
    gateway.pages = empty(*(f"page-{number}" for number in range(1000)))
    result = run("jobs", "--state", "failed", address=address)
    assert (asked := len(gateway.listed)) < 1000
    assert result.stderr == f"More: bottega jobs --state=failed -n 20 --page page-{asked - 1}\n"


def webp() -> image_pb2.Job:
    found = job(image_pb2.JOB_STATE_COMPLETED)
    found.spec.format = generation_pb2.IMAGE_FORMAT_WEBP
    return found


@pytest.mark.parametrize(
    ("look", "output", "status", "said"),
    [
        (running(12), [], 1, "job job-1 is running, 12 of 30 steps done"),
        (running(12), [], 1, "bottega jobs get job-1 --wait"),
        (webp(), ["-o", "star.png"], 2, "star.png is the name of a png file, but the format is webp."),
    ],
)
def test_a_picture_that_cannot_be_fetched_so_is_refused_before_it_is(
    gateway: ScriptedGateway, address: str, look: image_pb2.Job, output: list[str], status: int, said: str
) -> None:
    gateway.looks = [look]
    result = run("jobs", "get", "job-1", *output, address=address)
    assert result.exit_code == status
    assert said in result.stderr


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["jobs", "get", NO_UNICODE], "job_id"),
        (["models", "--address", NO_UNICODE], "address"),
        (["controlnets", "add", NO_UNICODE, "folder"], "name"),
    ],
)
def test_arguments_that_are_no_unicode_are_refused_by_name(address: str, arguments: list[str], field: str) -> None:
    result = run(*arguments, **({} if "--address" in arguments else {"address": address}))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: the request is invalid\n  {field}: must be " in result.stderr


def test_a_file_whose_name_is_no_unicode_is_written_and_said(
    gateway: ScriptedGateway, address: str, own_folder: Path
) -> None:
    gateway.scripts = [[completed()]]
    target = own_folder / f"{NO_UNICODE}.png"
    result = run("jobs", "get", "job-1", "-o", target, address=address)
    assert (result.exit_code, result.stderr) == (0, "")
    assert r"a\udcff.png  64x64  seed 7" in result.stdout
    assert target.read_bytes() == SMALL


def test_who_runs_out_of_time_is_told_how_far_it_came_and_what_gives_more(
    gateway: ScriptedGateway, address: str
) -> None:
    late = grpc.StatusCode.DEADLINE_EXCEEDED  # as gRPC itself ends a call whose time is up
    gateway.scripts = [[queued(), progress(12), late], [progress(3), late]]
    result = run("generate", "a star", "--timeout", "20", address=address)
    assert result.exit_code == 1
    assert "error: not done within 20 s: 12 of 30 steps were done, and job job-1 is cancelled" in result.stderr
    assert "ask for fewer steps, or do not wait" in result.stderr
    result = run("jobs", "watch", "job-1", "--timeout", "20", address=address)
    assert "3 of 30 steps were done, and job job-1 goes on" in result.stderr
    assert "Allow more time with --timeout" in result.stderr


def test_cancelling_and_deleting_name_each_job_and_stop_at_one_that_cannot_be(
    gateway: ScriptedGateway, address: str
) -> None:
    assert run("jobs", "cancel", "job-1", address=address).stdout == "job-1 cancelled\n"
    assert gateway.cancelled == ["job-1"]
    result = run("jobs", "delete", "job-1", "job-2", address=address)
    assert (result.exit_code, result.stdout) == (0, "job-1 deleted\njob-2 deleted\n")
    assert gateway.deleted == ["job-1", "job-2"]
    gateway.failures.append(JobNotFinished("the job has not ended: cancel it first"))
    result = run("jobs", "delete", "job-3", "job-4", address=address)
    assert result.exit_code == 1
    assert "cancel it first" in result.stderr
    assert gateway.deleted == ["job-1", "job-2"]
