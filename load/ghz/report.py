"""What ghz writes of a run (`--format json`), as far as a gate asks for it. Knows no bounds.

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
    """A run of ghz: one method under one profile.

    method: without its service. planned, count: calls that were to be made, and that ended, well or not.
    rps: calls that began, for each second. wanted_rps: at which they were to; None where it changes or is left open.
    ended: why it stopped; "normal" is after its last call. codes: how many calls ended with which status ("OK", ...).
    latencies_ms: of good calls, by percentile.
    errors: how many calls ended with which message.
    """

    method: str
    profile: str
    planned: int
    count: int
    rps: float
    wanted_rps: float | None
    ended: str
    codes: Mapping[str, int]
    latencies_ms: Mapping[int, float]
    errors: Mapping[str, int]


def read_report(path: Path) -> Report:
    """The report that is in the file. Raises ConfigError where it cannot be read, or is none of ghz's."""
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
    """Calls that began, for each second: ghz's own figure has those that ended, and a slow last answer lowers it."""
    began: list[float] = [
        datetime.fromisoformat(call["timestamp"]).timestamp() - call["latency"] / _NS_OF_S
        for call in values["details"] or ()
    ]
    if len(began) < 2 or max(began) == min(began):
        return float(values["rps"])
    return (len(began) - 1) / (max(began) - min(began))
