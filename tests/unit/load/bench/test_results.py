"""Results of benches: what `report` keeps, and the table that load/README.md shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from load.bench import report
from load.results import table


def test_a_run_is_kept_with_its_machine_and_conditions(tmp_path: Path) -> None:
    rows = [("a request (ratio)", "1.07", "at most 1.05"), ("  of it routing", "0.3 ms", "")]
    report.record("overhead", rows, {"ratio": 1.07}, conditions="15 requests", folder=tmp_path)
    run = json.loads((tmp_path / "overhead.json").read_text())
    assert run["values"] == {"ratio": 1.07}
    assert run["machine"] == report.machine()
    shown = table.table(tmp_path)
    assert f"{run['date']}, {run['machine'].partition(',')[0]}" in shown
    assert "; 15 requests" in shown
    assert "| a request | **1.07, missed** | at most 1.05 |" in shown
    assert "routing" not in shown  # it has no bar, and another figure has one


def test_nothing_is_kept_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[str] = []
    monkeypatch.setattr(report, "record", lambda bench, *rest, conditions: kept.append(conditions))
    monkeypatch.delenv(report.RECORD, raising=False)
    report.report("overhead", [], {})
    monkeypatch.setenv(report.RECORD, "nothing beside")
    report.report("overhead", [], {})
    assert kept == ["nothing beside"]


@pytest.mark.parametrize(
    ("measured", "wanted", "missed"),
    [
        ("1.05", "at most 1.05", False),
        ("1.051", "at most 1.05", True),
        ("0.89", "at least 0.9", True),
        ("1,008", "at least 900", False),
        ("0.41", "above 0", False),
        ("-0.1", "above 0", True),
        ("150 ms", "100 to 150 ms", False),
        ("yes", "at least 1", False),
    ],
)
def test_a_figure_on_the_wrong_side_of_its_bar_is_missed(measured: str, wanted: str, missed: bool) -> None:
    assert table.missed({"measured": measured, "wanted": wanted}) is missed


def test_the_page_shows_the_newest_results() -> None:
    page = table.README.read_text()
    assert table.written(page, table.table()) == page, "run `python -m load.results.table`"
