"""A very short soak, all of it real: every service as a process, and faults while requests go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.load_run import run_load

TIMEOUT_S = 600.0


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_short_soak_loses_nothing_and_writes_its_samples(tmp_path: Path) -> None:
    # In two minutes budgets are not full yet, so that there is growth, which makes 1 the exit status.
    options = ("--minutes", "2", "--every", "20", "--output", str(tmp_path))
    values = run_load("load.soak", *options, timeout_s=TIMEOUT_S)
    assert (values["bench"], values["lost"], values["double"]) == ("soak", 0, 0)
    assert values["requests"] > 60
    assert values["faults"] >= 3
    assert len((tmp_path / "samples.csv").read_text().splitlines()) > 30
    assert (tmp_path / "samples.png").stat().st_size > 0
