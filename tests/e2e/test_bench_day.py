"""A very short day, all of it real: the plain server, the suite with its stores, and the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 900.0


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_short_day_runs_through_both_sides_and_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "day.html"
    said = subprocess.run(
        [
            *(sys.executable, "-m", "load.bench.day", "--minutes", "0.5", "--rows", "controlnet_server"),
            *("--templates", "2", "--controlnets", "2", "--loras", "2", "--day-before", "4", "--steps-share", "0.1"),
            *("--page", str(page)),
        ],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "TRANSFORMERS_VERBOSITY": "error"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # Beside other tests requests may go out late, which makes the run void, and 1 the exit status.
    assert said.returncode in {0, 1}, said.stderr[-3000:]
    values = json.loads(said.stdout.splitlines()[-1])
    assert values["bench"] == "day"
    assert values["requests"] > 5
    assert values["suite_answered_share"] == values["plain_answered_share"] == 1.0
    assert values["controlnet_server_off_p95_s"] > 0
    assert "</html>" in page.read_text()
