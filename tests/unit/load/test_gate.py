"""Pass or fail of a load run: what ghz reported against bounds, and reports that have measured nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from load.gate import main
from tests.samples.ghz_reports import ghz_report

BOUNDS = """
[steady]
GetJob = { p50_ms = 5, p99_ms = 50, errors = 0.001 }

[step]
Generate = { p50_ms = 5, refused = 0.5 }
"""
OVERLOADED = {"OK": 600, "ResourceExhausted": 400}


@pytest.fixture
def slo(tmp_path: Path) -> Path:
    file = tmp_path / "slo.toml"
    file.write_text(BOUNDS)
    return file


def gate(slo: Path, *reports: Any, profile: str = "steady") -> int:
    """How it ends for these reports."""
    files = [slo.with_name(f"{place}.json") for place in range(len(reports))]
    for file, report in zip(files, reports, strict=True):
        file.write_text(report if isinstance(report, str) else json.dumps(report))
    return main(["--profile", profile, "--slo", str(slo), *map(str, files)])


def test_a_run_within_its_bounds_passes(slo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate(slo, ghz_report()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == {"gate": "pass", "profile": "steady", "reports": 1}
    assert [line.split()[:2] for line in lines[1:-1]] == [
        ["ok", "calls"], ["ok", "calls"], ["ok", "errors"], ["ok", "p50"], ["ok", "p99"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        ({"latencyDistribution": [{"percentage": 50, "latency": 5.1e6}, {"percentage": 99, "latency": 9}]}, ["p50"]),
        ({"latencyDistribution": [{"percentage": 50, "latency": 9}, {"percentage": 99, "latency": 51e6}]}, ["p99"]),
        # What ghz writes where no call ended well.
        ({"latencyDistribution": None, "statusCodeDistribution": {"Unavailable": 3000}}, ["errors", "p50", "p99"]),
        ({"statusCodeDistribution": {"OK": 2996, "Unavailable": 4}}, ["errors"]),
        # Refusals are errors where nothing is said of them.
        ({"statusCodeDistribution": {"OK": 2990, "ResourceExhausted": 10}}, ["errors"]),
        ({"rps": 98.9}, ["calls a second"]),
        ({"count": 2999, "statusCodeDistribution": {"OK": 2999}, "options": {"total": 3000}}, ["calls"]),
        ({"endReason": "timeout"}, ["calls"]),
    ],
)  # fmt: skip
def test_a_run_outside_of_a_bound_fails_and_says_of_which(
    slo: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], failed: list[str]
) -> None:
    assert gate(slo, ghz_report(**changed)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[2].strip() for line in lines if line.startswith("  FAIL")] == failed
    assert json.loads(lines[-1])["gate"] == "fail"


def test_refusals_under_overload_pass_up_to_their_share_and_hide_no_other_error(slo: Path) -> None:
    def of(codes: dict[str, int]) -> int:
        options = {"load-schedule": "step", "load-start": 1, "load-step": 1, "load-end": 4}
        report = ghz_report("Generate", "step", count=1000, statusCodeDistribution=codes, options=options, rps=1.0)
        return gate(slo, report, profile="step")

    assert of(OVERLOADED) == 0
    assert of({"OK": 499, "ResourceExhausted": 501}) == 1
    assert of({**OVERLOADED, "OK": 599, "Internal": 1}) == 1


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ("{}", "not a report of ghz: KeyError 'options'"),
        ({**ghz_report(), "tags": {}}, "not a report of ghz: KeyError 'profile'"),
        (json.dumps(ghz_report(rps=float("nan"))), "rps is no number"),
        (ghz_report("ListJobs"), "no bounds for ListJobs"),
        (ghz_report(profile="step"), "no bounds for GetJob under 'step'"),
    ],
)
def test_what_is_no_report_of_the_profile_ends_with_2_and_a_sentence(
    slo: Path, capsys: pytest.CaptureFixture[str], report: Any, said: str
) -> None:
    assert gate(slo, report) == 2
    assert said in capsys.readouterr().err


def test_a_method_without_a_report_is_no_pass(slo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slo.write_text(BOUNDS.replace("[step]", "ListJobs = {}\n\n[step]"))
    assert gate(slo, ghz_report()) == 2
    assert "no report of ListJobs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ("[steady]\nGetJob = { p98_ms = 5 }", "steady.GetJob.p98_ms is no bound"),
        ("[steady]\nGetJob = { errors = -1 }", "steady.GetJob.errors must be a number"),
        ("[steady", "slo.toml"),
        ("steady = 5", "steady is no table"),
        ("[smoke]\nGetJob = {}", "no profile 'steady'; there are smoke"),
    ],
)
def test_bounds_that_are_none_end_with_2_and_their_name(
    slo: Path, capsys: pytest.CaptureFixture[str], bounds: str, said: str
) -> None:
    slo.write_text(bounds)
    assert gate(slo, ghz_report()) == 2
    assert said in capsys.readouterr().err
