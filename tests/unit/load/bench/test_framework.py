"""What benches share: what a run is recorded as, its bars, sides by turns, and the table that load/README.md shows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from load.bench import framework
from load.bench.framework import Sheet, by_turns
from load.results import table


def test_a_run_is_recorded_with_its_machine_and_conditions_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(framework, "RESULTS", tmp_path)
    monkeypatch.setattr(
        framework.record, "__kwdefaults__", {**(framework.record.__kwdefaults__ or {}), "folder": tmp_path}
    )
    sheet = Sheet("overhead")
    sheet.figure("a request", 1.07, key="ratio", bar="at most 1.05")
    sheet.row("  of it routing", "0.3 ms")
    monkeypatch.delenv(framework.RECORD, raising=False)
    sheet.report()
    assert not list(tmp_path.iterdir())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"bench": "overhead", "ratio": 1.07}
    monkeypatch.setenv(framework.RECORD, "15 requests")
    sheet.report()
    run = json.loads((tmp_path / "overhead.json").read_text())
    assert run["values"] == {"ratio": 1.07}
    assert run["machine"] == framework.machine()
    assert run["conditions"] == "15 requests"
    shown = table.table(tmp_path)
    assert f"| **overhead**: {run['date']} |" in shown
    assert "| a request | **1.07, missed** | ≤ 1.05 |" in shown
    assert "routing" not in shown  # it has no bar, and another figure has one


@pytest.mark.parametrize(
    ("measured", "wanted", "missed"),
    [
        ("1.051", "at most 1.05", True),
        ("0.89", "at least 0.9", True),
        ("1,008", "at least 900", False),
        ("-0.1", "above 0", True),
        ("yes", "at least 1", False),
    ],
)
def test_a_figure_on_the_wrong_side_of_its_bar_is_missed(measured: str, wanted: str, missed: bool) -> None:
    assert framework.missed(measured, wanted) is missed


def test_the_page_shows_the_newest_results() -> None:
    page = table.README.read_text()
    assert table.written(page, table.table()) == page, "run `python -m load.results.table`"


def test_sides_alternate_and_rounds_that_warm_up_do_not_count() -> None:
    order: list[str] = []

    def side(name: str, number: int) -> int:
        order.append(name)
        return number

    found = by_turns({name: partial(side, name) for name in "ab"}, 2)
    assert found == {"a": [1, 2], "b": [1, 2]}
    assert "".join(order) == "abbaab"
