"""`bottega jobs` and `generate --detach` as people use them, against a gateway that follows a script."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bottega.errors import DeadlineUnmeetable, JobNotFinished
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


def test_jobs_are_a_table_and_say_where_it_goes_on(address: str) -> None:
    result = run("jobs", address=address)
    assert result.exit_code == 0, result.output
    assert "job-1" in result.stdout
    assert "failed" in result.stdout
    assert datetime(2026, 1, 2, tzinfo=UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S") in result.stdout
    assert result.stderr.startswith("More: bottega jobs ")
    assert result.stderr.endswith("--page more\n")


def test_filters_and_pages_reach_the_gateway_and_come_again_on_the_next_page(
    gateway: ScriptedGateway, address: str
) -> None:
    options = "--state failed --state cancelled --since 2h --until 2026-01-03T10:30+00:00 -n 7 --page abc"
    before = datetime.now(UTC)
    result = run("jobs", *options.split(), address=address)
    asked = gateway.listed[0]
    assert list(asked.states) == [image_pb2.JOB_STATE_FAILED, image_pb2.JOB_STATE_CANCELLED]
    assert (asked.page_size, asked.page_token) == (7, "abc")
    since = asked.created_after.ToDatetime(tzinfo=UTC)
    assert abs(since - (before - timedelta(hours=2))) < timedelta(seconds=30)
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


def test_pages_without_jobs_are_turned_until_there_are_some(gateway: ScriptedGateway, address: str) -> None:
    gateway.pages = [image_pb2.ListJobsResponse(next_page_token=token) for token in ("second", "third")]
    result = run("jobs", "--state", "failed", "-n", "7", address=address)
    assert [asked.page_token for asked in gateway.listed] == ["", "second", "third"]
    assert {(asked.page_size, tuple(asked.states)) for asked in gateway.listed} == {(7, (image_pb2.JOB_STATE_FAILED,))}
    assert "job-1" in result.stdout
    assert result.stderr.endswith("--page more\n")


def test_pages_without_jobs_are_not_turned_without_end(gateway: ScriptedGateway, address: str) -> None:
    gateway.pages = [image_pb2.ListJobsResponse(next_page_token=f"page-{number}") for number in range(1000)]
    result = run("jobs", "--state", "failed", address=address)
    asked = len(gateway.listed)
    assert asked < 1000
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"More: bottega jobs --state=failed -n 20 --page page-{asked - 1}\n"


def test_no_jobs_are_said_when_no_page_is_left(gateway: ScriptedGateway, address: str) -> None:
    gateway.pages = [image_pb2.ListJobsResponse(next_page_token="second"), image_pb2.ListJobsResponse()]
    result = run("jobs", "--state", "failed", address=address)
    assert (len(gateway.listed), result.stdout, result.stderr) == (2, "", "There are no such jobs.\n")


def test_watching_tells_how_it_goes_and_how_to_have_the_picture(gateway: ScriptedGateway, address: str) -> None:
    gateway.scripts = [[queued(2), progress(10), completed()]]
    result = run("jobs", "watch", "job-1", address=address)
    assert result.exit_code == 0
    assert "queued, 2 before it, about 2 s" in result.stderr
    assert "step 10 of 30" in result.stderr
    assert result.stdout == "job-1 completed: 1 picture\n"
    assert "bottega jobs get job-1" in result.stderr


def test_cancelling_says_what_became_of_the_job(gateway: ScriptedGateway, address: str) -> None:
    result = run("jobs", "cancel", "job-1", address=address)
    assert (result.exit_code, result.stdout) == (0, "job-1 cancelled\n")
    assert gateway.cancelled == ["job-1"]


def test_a_picture_without_a_name_is_called_by_its_prompt(
    gateway: ScriptedGateway, address: str, own_folder: Path
) -> None:
    gateway.looks = [running()]
    gateway.scripts = [[progress(20), completed()]]
    result = run("jobs", "get", "job-1", "--wait", address=address)
    assert result.exit_code == 0, result.output
    assert "step 20 of 30" in result.stderr
    assert (own_folder / "a-big-red-star-7.png").exists()


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


@pytest.mark.parametrize("seconds", ["8", "0.01"])
def test_who_waits_for_nothing_is_not_told_to_wait_for_nothing(
    gateway: ScriptedGateway, address: str, seconds: str
) -> None:
    gateway.failures = [DeadlineUnmeetable("would take 80 s")]
    result = run("generate", "a star", "--detach", "--timeout", seconds, address=address)
    assert result.exit_code == 1
    assert "Allow more time with --timeout SECONDS, or leave --timeout out" in result.stderr
    assert "--detach" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["jobs", "get", NO_UNICODE], "job_id"),
        (["jobs", "list", "--page", NO_UNICODE], "page_token"),
        (["models", "--address", NO_UNICODE], "address"),
        (["fleet", "--fleet-address", NO_UNICODE], "fleet_address"),
        (["controlnets", "add", NO_UNICODE, "folder"], "name"),
    ],
)
def test_arguments_that_are_no_unicode_are_refused_by_name(address: str, arguments: list[str], field: str) -> None:
    result = run(*arguments, **({} if "--address" in arguments else {"address": address}))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: the request is invalid\n  {field}: must be " in result.stderr


def test_a_path_that_is_no_unicode_is_not_on_this_machine_nor_to_be_asked_for(address: str) -> None:
    result = run("loras", "add", "ink", NO_UNICODE, address=address)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no file or folder a\\udcff on this machine\n" in result.stderr
    assert "must be Unicode text" in result.stderr


def test_a_file_whose_name_is_no_unicode_is_written_and_said(
    gateway: ScriptedGateway, address: str, own_folder: Path
) -> None:
    gateway.scripts = [[completed()]]
    target = own_folder / f"{NO_UNICODE}.png"
    # A terminal of UTF-8, which CliRunner's is not as strict as.
    result = subprocess.run(
        [sys.executable, "-m", "bottega.client.cli", "jobs", "get", "job-1", "-o", target, "--address", address],
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert rb"a\udcff.png  64x64  seed 7" in result.stdout
    assert target.read_bytes() == SMALL


@pytest.mark.parametrize(
    ("arguments", "steps", "what", "todo"),
    [
        (
            ["generate", "a star"],
            12,
            "12 of 30 steps were done, and job job-1 is cancelled",
            "ask for fewer steps, or do not wait",
        ),
        (
            ["jobs", "watch", "job-1"],
            3,
            "3 of 30 steps were done, and job job-1 goes on",
            "Allow more time with --timeout",
        ),
    ],
)
def test_who_runs_out_of_time_is_told_how_far_it_came_and_what_gives_more(
    gateway: ScriptedGateway, address: str, arguments: list[str], steps: int, what: str, todo: str
) -> None:
    gateway.scripts = [[queued(), progress(steps), threading.Event()]]
    result = run(*arguments, "--timeout", "0.8", address=address)
    assert result.exit_code == 1
    assert f"error: not done within 0.8 s: {what}" in result.stderr
    assert todo in result.stderr


def test_deleting_names_each_job_and_stops_at_one_that_cannot_be(gateway: ScriptedGateway, address: str) -> None:
    result = run("jobs", "delete", "job-1", "job-2", address=address)
    assert (result.exit_code, result.stdout) == (0, "job-1 deleted\njob-2 deleted\n")
    assert gateway.deleted == ["job-1", "job-2"]
    gateway.failures.append(JobNotFinished("the job has not ended: cancel it first"))
    result = run("jobs", "delete", "job-3", "job-4", address=address)
    assert result.exit_code == 1
    assert "cancel it first" in result.stderr
    assert gateway.deleted == ["job-1", "job-2"]
