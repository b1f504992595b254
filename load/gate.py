"""Pass or fail: reports of ghz against the bounds of load/slo.toml, of which ghz itself knows none.

`python -m load.gate --profile steady out/ghz/steady/*.json` prints a line for each bound. The exit status is 0 where
all hold, 1 where one does not, and 2 where a method has no report, or one that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bottega.errors import BottegaError, ConfigError
from load.ghz.report import Report, read_report

SLO = Path(__file__).parent / "slo.toml"
# Of the wanted rate. What was asked more slowly than that has not shown that the wanted one is served.
LEAST_RATE = 0.99
_REFUSED = "ResourceExhausted"
_SHOWN_ERRORS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The bounds of a method under a profile. Absent percentiles are not judged."""

    p50_ms: float | None = None
    """At most, of calls that ended well."""
    p95_ms: float | None = None
    """At most, of calls that ended well."""
    p99_ms: float | None = None
    """At most, of calls that ended well."""
    errors: float = 0.0
    """Share of the calls that may fail."""
    refused: float = 0.0
    """Share that may be refused with RESOURCE_EXHAUSTED, which counts as no error then."""


_BOUNDS = tuple(field.name for field in fields(Objective))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A bound, and whether it held."""

    what: str
    measured: str
    wanted: str
    held: bool


def read_objectives(path: Path) -> Mapping[str, Mapping[str, Objective]]:
    """Return the objectives by profile and method. Raises ConfigError with what is wrong."""
    try:
        profiles = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return {
        profile: {
            method: Objective(**_table(values, f"{path}: {profile}.{method}", known=_BOUNDS))
            for method, values in _table(methods, f"{path}: {profile}").items()
        }
        for profile, methods in profiles.items()
    }


def judge(report: Report, objective: Objective) -> list[Verdict]:
    """Judge every bound of a report: that it was a whole run at its rate, its errors, and its latencies."""
    return [*_whole(report), *_outcomes(report, objective), *_latencies(report, objective)]


def _table(values: Any, where: str, *, known: Collection[str] = ()) -> dict[str, Any]:
    """Check that a value is a table, and return it.

    Args:
        values: The value.
        where: For an error.
        known: Names that it may have, each of a number; empty is anything.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is no table of bounds")
    for name, value in values.items() if known else ():
        if name not in known:
            raise ConfigError(f"{where}.{name} is no bound; there are {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"{where}.{name} must be a number, 0 or more, not {value!r}")
    return values


def _whole(report: Report) -> Iterator[Verdict]:
    """Judge whether the run was whole: one that ended early, or was too slow to ask, has judged nothing."""
    yield Verdict(
        what="calls",
        measured=f"{report.count}"
        + ("" if report.ended == "normal" else f", ended by {report.ended or 'an unknown reason'}"),
        wanted=f"{report.planned}",
        held=report.count == report.planned > 0 and report.ended == "normal",
    )
    if report.wanted_rps is not None:
        least = report.wanted_rps * LEAST_RATE
        held = report.rps >= least
        yield Verdict(what="calls a second", measured=f"{report.rps:.1f}", wanted=f">= {least:.1f}", held=held)


def _outcomes(report: Report, objective: Objective) -> Iterator[Verdict]:
    ended = sum(report.codes.values())
    refused = report.codes.get(_REFUSED, 0) if objective.refused else 0
    failed = ended - report.codes.get("OK", 0) - refused
    yield _share("errors", failed, ended, objective.errors)
    if objective.refused:
        yield _share("refused", refused, ended, objective.refused)


def _share(what: str, count: int, ended: int, most: float) -> Verdict:
    share = count / ended if ended else 1.0
    return Verdict(what=what, measured=f"{share:.2%}", wanted=f"<= {most:.2%}", held=share <= most)


def _latencies(report: Report, objective: Objective) -> Iterator[Verdict]:
    for percentile, most in ((50, objective.p50_ms), (95, objective.p95_ms), (99, objective.p99_ms)):
        if most is None:
            continue
        took = report.latencies_ms.get(percentile)
        measured = "no good call" if took is None else f"{took:.1f} ms"
        held = took is not None and took <= most
        yield Verdict(what=f"p{percentile}", measured=measured, wanted=f"<= {most:g} ms", held=held)


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge, print, and return the exit status."""
    options = _options(arguments)
    try:
        objectives = read_objectives(options.slo)
        reports = [read_report(path) for path in options.reports]
        held = _judge_all(reports, objectives, options.profile)
    except BottegaError as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"gate": "pass" if held else "fail", "profile": options.profile, "reports": len(reports)}))
    return 0 if held else 1


def _judge_all(reports: Sequence[Report], objectives: Mapping[str, Mapping[str, Objective]], profile: str) -> bool:
    """Print every verdict, and return whether all bounds hold.

    Raises ConfigError where a method of the profile has no report, or a report no bounds.
    """
    wanted = objectives.get(profile)
    if wanted is None:
        raise ConfigError(f"the bounds know no profile {profile!r}; there are {', '.join(objectives)}")
    for report in reports:
        if report.profile != profile or report.method not in wanted:
            raise ConfigError(f"there are no bounds for {report.method} under {report.profile!r} in {profile!r}")
    if missing := wanted.keys() - {report.method for report in reports}:
        raise ConfigError(f"no report of {', '.join(sorted(missing))}; a bound that was not measured does not hold")
    held = [_tell(report, judge(report, wanted[report.method])) for report in reports]
    return all(held)


def _tell(report: Report, verdicts: Sequence[Verdict]) -> bool:
    print(f"{report.profile} {report.method}")
    for verdict in verdicts:
        mark = "ok  " if verdict.held else "FAIL"
        print(f"  {mark}  {verdict.what:<14}  {verdict.measured:>12}  {verdict.wanted:>12}")
    held = all(verdict.held for verdict in verdicts)
    if not held:
        for text, count in sorted(report.errors.items(), key=lambda entry: -entry[1])[:_SHOWN_ERRORS]:
            print(f"        {count} x {text!r}")
    return held


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m load.gate", description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="of ghz --format json")
    parser.add_argument("--profile", required=True, help="smoke, steady or step")
    parser.add_argument("--slo", type=Path, default=SLO, help="the bounds; default: load/slo.toml")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
