"""A report that ghz writes of a run (`--format json`), as far as a gate needs it.

Source: ghz's documentation of its output and its type Report. Durations there are nanoseconds; a call's timestamp is
that of its end; a percentage of the latency distribution that no good call reached has percentage 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bottega.errors import ConfigError

_NS_OF_MS = 1e6
_NS_OF_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run of ghz: one method under one profile."""

    method: str
    """Without its service."""
    profile: str
    planned: int
    """Calls that were to be made."""
    count: int
    """Calls that ended, well or not."""
    rps: float
    """Calls that began, a second."""
    wanted_rps: float | None
    """Calls that were to begin, a second; None where that changes or is left open."""
    ended: str
    """Why it stopped; "normal" is after its last call."""
    codes: Mapping[str, int]
    """Calls by the status that they ended with, such as OK."""
    latencies_ms: Mapping[int, float]
    """Latencies of good calls, by percentile."""
    errors: Mapping[str, int]
    """Calls by the message that they ended with."""


def read_report(path: Path) -> Report:
    """Read a report. Raises ConfigError where a file cannot be read, or is none of ghz's."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error}); ghz writes it with --format json") from error
    try:
        return _report(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not a report of ghz: {type(error).__name__} {error}") from error


def _report(values: Any) -> Report:
    options = values["options"]
    constant = options.get("load-schedule", "const") == "const"
    rps = _begun_rps(values)
    if not math.isfinite(rps):
        raise ValueError("rps is no number")
    return Report(
        method=str(options["call"]).replace("/", ".").rpartition(".")[2],
        profile=str(values["tags"]["profile"]),
        planned=int(options["total"]),
        count=int(values["count"]),
        rps=rps,
        wanted_rps=float(options["rps"]) if constant and options.get("rps") else None,
        ended=str(values.get("endReason", "")),
        codes={str(code): int(count) for code, count in (values["statusCodeDistribution"] or {}).items()},
        latencies_ms={
            int(entry["percentage"]): float(entry["latency"]) / _NS_OF_MS
            for entry in values["latencyDistribution"] or ()
            if entry["percentage"]
        },
        errors={str(text): int(count) for text, count in (values["errorDistribution"] or {}).items()},
    )


def _begun_rps(values: Any) -> float:
    """Return calls that began, a second: ghz's figure is of those that ended, and a slow last answer lowers it."""
    began: list[float] = [
        datetime.fromisoformat(call["timestamp"]).timestamp() - call["latency"] / _NS_OF_S
        for call in values["details"] or ()
    ]
    if len(began) < 2 or max(began) == min(began):
        return float(values["rps"])
    return (len(began) - 1) / (max(began) - min(began))
