"""How a bench reports: a table for people, one line of JSON for programs and, on request, a file in load/results."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"
RECORD = "BENCH_RECORD"
"""Environment variable with the conditions of a run. Where it is set, `report` writes the run to `RESULTS`."""


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` (in 0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def machine() -> str:
    """Return the processor's name and its number of cores."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def report(
    bench: str,
    rows: Sequence[tuple[str, str, str]],
    values: Mapping[str, float],
    *,
    heads: tuple[str, str] = ("measured", "wanted"),
) -> None:
    """Print the figures of a run, and record them where `BENCH_RECORD` is set.

    Args:
        bench: Its name, as in `make bench-NAME`.
        rows: What was measured, and two texts under `heads`.
        values: The figures for programs, printed as the last line: {"bench": ..., ...}.
        heads: The titles of the second and the third column.
    """
    table = [("", *heads), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    print(f"\n{bench}, on {machine()}")
    for what, measured, wanted in table:
        print(f"  {what:<{widths[0]}}  {measured:>{widths[1]}}  {wanted:>{widths[2]}}")
    rounded = {key: round(value, 4) for key, value in values.items()}
    conditions = os.environ.get(RECORD)
    if conditions:
        record(bench, rows, rounded, conditions=conditions)
    print(json.dumps({"bench": bench, **rounded}), flush=True)


def record(
    bench: str,
    rows: Sequence[tuple[str, str, str]],
    values: Mapping[str, float],
    *,
    conditions: str,
    folder: Path = RESULTS,
) -> None:
    """Write a run to `folder`/BENCH.json, in place of the run that is there.

    Args:
        bench: Its name.
        rows: What was measured, the figure, and the bar or "".
        values: The figures for programs.
        conditions: The run's arguments and what else the machine did.
        folder: Where results are kept.
    """
    run = {
        "bench": bench,
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "machine": machine(),
        "conditions": conditions,
        "rows": [{"what": what.strip(), "measured": measured, "wanted": wanted} for what, measured, wanted in rows],
        "values": dict(values),
    }
    (folder / f"{bench}.json").write_text(json.dumps(run, indent=1) + "\n")
