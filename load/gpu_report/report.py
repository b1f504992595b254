"""Figures, the outcomes of parts in a folder, and the report: a table for people and a line of JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from load.gpu_report.parts import Part

Status = Literal["measured", "left out", "failed"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure, and its bar."""

    name: str
    """In the line of JSON."""
    label: str
    """For people."""
    value: float
    """In `unit`. NaN is a result that could not be computed."""
    unit: str = ""
    group: str = ""
    """Title of the figures that are drawn side by side. Empty is not drawn."""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def shown(self) -> str:
        """The value, for people."""
        digits = 0 if abs(self.value) >= 1000 else 1 if abs(self.value) >= 100 else 2 if abs(self.value) >= 1 else 4
        return f"{self.value:.{digits}f} {self.unit}".strip()

    @property
    def wanted(self) -> str:
        """The bar, and whether it is missed; empty without a bar."""
        if self.bound is None:
            return ""
        word = "at least" if self.at_least is not None else "at most"
        return f"{word} {self.bound:g}{'' if self.met else '  MISSED'}"

    @property
    def bound(self) -> float | None:
        """The number of the bar."""
        return self.at_least if self.at_least is not None else self.at_most

    @property
    def met(self) -> bool:
        """Whether the bar is met; true without a bar."""
        if self.bound is None:
            return True
        return self.value >= self.bound if self.at_least is not None else self.value <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A part's result."""

    part: str
    status: Status
    seconds: float
    """Seconds that it took."""
    setting: Mapping[str, str]
    """The machine, the versions and the code."""
    figures: Sequence[Figure] = ()
    why: str = ""
    """Why it was left out or failed."""

    @property
    def reason(self) -> str:
        """The last line of `why`."""
        return self.why.strip().rpartition("\n")[2]


class Results:
    """Outcomes of one setting, a file for each in a folder, which is made."""

    def __init__(self, folder: Path, setting: Mapping[str, str]) -> None:
        self.folder = folder
        self.setting = dict(setting)
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, part: str) -> Outcome | None:
        """Return a part's outcome; None where it has not run to its end in this setting."""
        try:
            fields = json.loads(self._path(part).read_text(encoding="utf-8"))
            figures = [
                Figure(**{**each, "value": math.nan if each["value"] is None else each["value"]})
                for each in fields.pop("figures")
            ]
            outcome = Outcome(figures=figures, **fields)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            return None  # cut off while it was written, or of an earlier report
        return outcome if outcome.setting == self.setting else None

    def put(self, outcome: Outcome) -> None:
        """Keep an outcome, all of it or nothing."""
        fields = asdict(outcome)
        for each in fields["figures"]:
            each["value"] = None if math.isnan(each["value"]) else each["value"]  # which every reader of JSON knows
        partial = self._path(outcome.part).with_suffix(".partial")
        partial.write_text(json.dumps(fields, indent=1), encoding="utf-8")
        partial.replace(self._path(outcome.part))

    def forget(self, part: str) -> None:
        """Remove a part's outcome."""
        self._path(part).unlink(missing_ok=True)

    def _path(self, part: str) -> Path:
        return self.folder / f"{part}.json"


Found = Mapping[str, Outcome | None]
"""Outcomes by part; None of one that has not run."""


def table_of(parts: Sequence[Part], found: Found, setting: Mapping[str, str]) -> Iterator[str]:
    """Yield lines: where it ran, then each part with its figures, or why it has none."""
    yield "; ".join(f"{name} {value}" for name, value in setting.items() if value)
    figures = all_figures(parts, found)
    labels = max((len(each.label) for each in figures), default=0)
    values = max((len(each.shown) for each in figures), default=0)
    for part in parts:
        outcome = found[part.name]
        yield f"\n{part.question}  [{part.name}{_state(outcome)}]"
        for figure in outcome.figures if outcome is not None else ():
            yield f"  {figure.label:<{labels}}  {figure.shown:>{values}}  {figure.wanted}".rstrip()


def json_of(parts: Sequence[Part], found: Found, setting: Mapping[str, str]) -> str:
    """Return a JSON object with every figure by its name, and the parts that are not measured with the reason."""
    fields: dict[str, object] = {"bench": "gpu-report", **setting}
    for figure in all_figures(parts, found):
        fields[figure.name] = None if math.isnan(figure.value) else float(f"{figure.value:.6g}")
    fields["missed"] = [figure.name for figure in all_figures(parts, found) if not figure.met]
    for status in ("left out", "failed"):
        reasons = {name: outcome.reason for name, outcome in found.items() if outcome and outcome.status == status}
        fields[status.replace(" ", "_")] = reasons
    fields["not_run"] = [part.name for part in parts if found[part.name] is None]
    return json.dumps(fields)


def all_figures(parts: Sequence[Part], found: Found) -> list[Figure]:
    """Return the figures of all parts, in their order."""
    outcomes = (found[part.name] for part in parts)
    return [figure for outcome in outcomes if outcome is not None for figure in outcome.figures]


def _state(outcome: Outcome | None) -> str:
    if outcome is None:
        return ": not run"
    if outcome.status == "measured":
        return f", {outcome.seconds:.0f} s"
    return f": {outcome.status}: {outcome.reason}"
