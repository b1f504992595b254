"""A very short day, all of it real: the plain server, the suite with its stores, and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.load_run import run_load

TIMEOUT_S = 900.0


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_short_day_runs_through_both_sides_and_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "day.html"
    options = [
        *("--minutes", "0.5", "--rows", "controlnet_server", "--steps-share", "0.1", "--page", str(page)),
        *("--templates", "2", "--controlnets", "2", "--loras", "2", "--day-before", "4"),
        # Some requests on a slow machine, too, and all of them answered.
        *("--load", "2", "--deadline-s", "120"),
    ]
    # Beside other tests requests may go out late, which makes the run void, and 1 the exit status.
    values = run_load("load.bench.day", *options, timeout_s=TIMEOUT_S)
    assert values["bench"] == "day"
    assert values["requests"] > 5
    assert values["suite_answered_share"] == values["plain_answered_share"] == 1.0
    assert values["controlnet_server_off_p95_s"] > 0
    assert "</html>" in page.read_text()
