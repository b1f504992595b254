"""How a bench reports: a table for people, then one line of JSON for programs."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (in 0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def machine() -> str:
    """The processor and how much of it there is."""
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
    """Prints the rows (what, and what `heads` says), the machine, and as the last line {"bench": ..., ...}."""
    table = [("", *heads), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    print(f"\n{bench}, on {machine()}")
    for what, measured, wanted in table:
        print(f"  {what:<{widths[0]}}  {measured:>{widths[1]}}  {wanted:>{widths[2]}}")
    print(json.dumps({"bench": bench, **{key: round(value, 4) for key, value in values.items()}}), flush=True)
