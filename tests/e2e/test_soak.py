"""A very short soak, all of it real: every service as a process, and faults while requests go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 600.0


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_short_soak_loses_nothing_and_writes_its_samples(tmp_path: Path) -> None:
    said = subprocess.run(
        [*(sys.executable, "-m", "load.soak", "--minutes", "2", "--every", "20"), *("--output", str(tmp_path))],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "TRANSFORMERS_VERBOSITY": "error"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # In two minutes budgets are not full yet, so that there is growth, which makes 1 the exit status.
    assert said.returncode in {0, 1}, said.stderr[-3000:]
    values = json.loads(said.stdout.splitlines()[-1])
    assert (values["bench"], values["lost"], values["double"]) == ("soak", 0, 0)
    assert values["requests"] > 60
    assert values["faults"] >= 3
    assert len((tmp_path / "samples.csv").read_text().splitlines()) > 30
    assert (tmp_path / "samples.png").stat().st_size > 0
