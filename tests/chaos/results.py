"""What the parts of `make chaos` have counted, and the record of the newest run of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from load.bench import framework
from load.bench.framework import RESULTS, Sheet, machine, today
from tests.chaos.schedulers import TAKEOVER_S
from tests.chaos.tally import Tally
from tests.chaos.workers import MOST_REPEATED

_BENCH = "chaos"
_KILLED = ("kill_workers", "kill_editing_workers", "kill_reusing_workers")
_WANTED = {f"{part}_most_repeated_steps": f"at most {MOST_REPEATED}" for part in _KILLED} | {
    "schedulers_takeover_p99_s": f"at most {TAKEOVER_S:g}",
    "schedulers_disturbances": "at least 200",
}


def show(played: Mapping[str, Tally]) -> None:
    """Print the figures of this run and, as the last line, a JSON object."""
    _sheet(played).show()


def record(played: Mapping[str, Tally], conditions: str, folder: Path = RESULTS) -> None:
    """Write what parts counted to chaos.json in `folder`. Parts that did not run keep their newest run.

    Each part has its date and conditions. The rows, and the numbers that must be 0, are those of all parts.
    """
    path = folder / f"{_BENCH}.json"
    parts = json.loads(path.read_text()).get("parts", {}) if path.exists() else {}
    run = {"date": today(), "machine": machine(), "conditions": conditions}
    for name, tally in played.items():
        parts[name] = {**run, "zeros": tally.zeros, "figures": tally.figures, "faults": tally.faults}
    newest = {
        name: Tally(**part["zeros"], figures=part["figures"], faults=part["faults"]) for name, part in parts.items()
    }
    sheet = _sheet(newest)
    framework.record(_BENCH, sheet.rows, sheet.values, conditions="see parts", parts=parts, folder=folder)


def _sheet(parts: Mapping[str, Tally]) -> Sheet:
    whole = Tally()
    for name, tally in parts.items():
        whole.add(name, tally)
    sheet = Sheet(_BENCH)
    sheet.rows = [(name.replace("_", " "), str(count), "at most 0") for name, count in whole.zeros.items()]
    for name, value in whole.figures.items():
        sheet.row(name.replace("_", " "), f"{value:g}", _WANTED.get(name, ""))
    sheet.row("bounds that did not hold", str(len(whole.faults)), "0")
    sheet.values |= {**whole.zeros, **whole.figures, "faults": len(whole.faults)}
    return sheet
