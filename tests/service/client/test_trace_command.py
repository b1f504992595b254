"""`bottega trace` as people use it, against a gateway that follows a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bottega.errors import TraceNotFound
from bottega.v1.trace_pb2 import Span, Trace
from tests.fakes.scripted_gateway import ScriptedGateway
from tests.support.terminal import run

TRACE = Trace(
    spans=[
        Span(name="queue", track="jobs", begin_ns=0, duration_ns=400_000_000),
        Span(name="step 0", service="w0", track="denoise", begin_ns=500_000_000, duration_ns=250_000_000),
        Span(name="step 1", service="w0\x1b[31m", track="denoise", begin_ns=750_000_000, duration_ns=1_250_000_000),
    ]
)


def test_the_file_and_the_picture_are_written_and_the_times_said(
    gateway: ScriptedGateway, address: str, own_folder: Path
) -> None:
    gateway.trace = TRACE
    result = run("trace", "job-1", "-o", "day.json", "--svg", address=address)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["day.json", "day.svg"]
    assert "gateway, jobs: 400.0 ms" in result.stderr
    assert "denoise: 1,250.0 ms" in result.stderr
    assert "\x1b" not in result.stderr
    assert "https://ui.perfetto.dev" in result.stderr
    written = json.loads((own_folder / "day.json").read_text())
    assert [each["name"] for each in written["traceEvents"] if each["ph"] == "X"] == ["queue", "step 0", "step 1"]
    assert (own_folder / "day.svg").read_text().startswith("<svg ")


def test_without_a_name_the_file_is_named_after_the_job(
    gateway: ScriptedGateway, address: str, own_folder: Path
) -> None:
    gateway.trace = Trace(dropped=7)
    result = run("trace", "job-1", address=address)
    assert (result.exit_code, result.stdout) == (0, "trace-job-1.json\n")
    assert "7 spans were left out" in result.stderr
    assert [path.name for path in own_folder.iterdir()] == ["trace-job-1.json"]


@pytest.mark.usefixtures("own_folder")
def test_a_job_that_has_no_trace_yet_says_what_to_do(gateway: ScriptedGateway, address: str) -> None:
    gateway.failures = [TraceNotFound("no attempt at the job has ended yet")]
    result = run("trace", "job-1", address=address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: no attempt at the job has ended yet" in result.stderr
    assert "bottega jobs watch" in result.stderr


@pytest.mark.usefixtures("gateway")
def test_the_picture_is_not_written_over_the_file_for_a_viewer(address: str, own_folder: Path) -> None:
    result = run("trace", "job-1", "-o", "day.SVG", "--svg", address=address)
    assert result.exit_code == 2
    assert "-o day.json" in result.stderr
    assert not list(own_folder.iterdir())
