"""The report for people and for programs: a table of all figures, and one line of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from load.gpu_report.figures import Figure
from load.gpu_report.parts import Part
from load.gpu_report.results import Outcome

Found = Mapping[str, Outcome | None]
"""By part; None of one that has not run."""


def table_of(parts: Sequence[Part], found: Found, setting: Mapping[str, str]) -> Iterator[str]:
    """Line by line: where it ran, then each part with its figures, or why it has none."""
    yield "; ".join(f"{name} {value}" for name, value in setting.items() if value)
    figures = all_figures(parts, found)
    labels, values = (max((len(each) for each in column), default=0) for column in _columns(figures))
    for part in parts:
        outcome = found[part.name]
        yield f"\n{part.question}  [{part.name}{_state(outcome)}]"
        for figure in outcome.figures if outcome is not None else ():
            yield f"  {figure.label:<{labels}}  {figure.said:>{values}}  {figure.wanted}".rstrip()


def json_of(parts: Sequence[Part], found: Found, setting: Mapping[str, str]) -> str:
    """{"bench": "gpu-report", ...}: every figure by its name, and which parts are not measured, with the reason."""
    said: dict[str, Any] = {"bench": "gpu-report", **setting}
    for figure in all_figures(parts, found):
        said[figure.name] = None if math.isnan(figure.value) else float(f"{figure.value:.6g}")
    said["missed"] = [figure.name for figure in all_figures(parts, found) if not figure.met]
    for status in ("left out", "failed"):
        reasons = {name: _why(outcome) for name, outcome in found.items() if outcome and outcome.status == status}
        said[status.replace(" ", "_")] = reasons
    said["not_run"] = [part.name for part in parts if found[part.name] is None]
    return json.dumps(said)


def all_figures(parts: Sequence[Part], found: Found) -> list[Figure]:
    """Of all parts, in their order."""
    outcomes = (found[part.name] for part in parts)
    return [figure for outcome in outcomes if outcome is not None for figure in outcome.figures]


def _columns(figures: Sequence[Figure]) -> tuple[list[str], list[str]]:
    return [figure.label for figure in figures], [figure.said for figure in figures]


def _state(outcome: Outcome | None) -> str:
    if outcome is None:
        return ": not run"
    if outcome.status == "measured":
        return f", {outcome.seconds:.0f} s"
    return f": {outcome.status}: {_why(outcome)}"


def _why(outcome: Outcome) -> str:
    lines = outcome.why.strip().splitlines()
    return lines[-1] if lines else ""
