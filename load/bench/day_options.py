"""What a person asks of the bench of a day."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from load.bench.day_techniques import LABELS

_ALL_ROWS, _NO_ROWS = "all", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class DayOptions:
    """mix: its name or file. seed: of the first day. minutes: of a day. rounds: days of both sides.

    load: of what the plain server can draw one by one, what comes on average. steps_share: of the mix's steps, those
    that are made. templates, controlnets, loras: how many there are. day_before: pictures that the cache has seen
    before, at most. rows: techniques that a day is drawn without. threads: of each engine. deadline_s: of a request;
    None is by what the slowest takes alone. page: to write.
    """

    mix: str
    seed: int
    minutes: float
    rounds: int
    load: float
    steps_share: float
    templates: int
    controlnets: int
    loras: int
    day_before: int
    rows: Sequence[str]
    threads: int
    deadline_s: float | None
    page: Path

    @property
    def length_s(self) -> float:
        """Of a day."""
        return 60.0 * self.minutes


def parse(about: str | None, arguments: Sequence[str] | None = None) -> DayOptions:
    """Those of this process, unless others are given. Ends the process for those that cannot be."""
    parser = argparse.ArgumentParser(prog="make bench-day", description=about)
    parser.add_argument("--minutes", type=_above_0, default=5.0, help="that a day takes (default: 5)")
    parser.add_argument("--rounds", type=_count, default=1, help="days of both sides, each another one (default: 1)")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=[*LABELS, _ALL_ROWS, _NO_ROWS],
        default=[_ALL_ROWS],
        metavar="NAME",
        help=f"techniques that a day is drawn without: {', '.join(LABELS)}; {_ALL_ROWS} (default), or {_NO_ROWS}",
    )
    parser.add_argument("--mix", default="day", help="of load/replay/mixes, or a TOML file (default: day)")
    parser.add_argument("--seed", type=int, default=1, help="of the first day (default: 1)")
    parser.add_argument("--load", type=_above_0, default=0.8, help="of what the plain server draws one by one (.8)")
    parser.add_argument(
        "--steps-share", type=_above_0, default=0.4, help="of the mix's steps, those that are made (.4)"
    )
    parser.add_argument("--templates", type=_count, default=12, help="that are edited (default: 12)")
    parser.add_argument("--controlnets", type=_count, default=8, help="that there are (default: 8)")
    parser.add_argument("--loras", type=_count, default=12, help="that there are (default: 12)")
    parser.add_argument("--day-before", type=int, default=60, help="pictures that the cache has seen, at most (60)")
    parser.add_argument("--threads", type=_count, default=os.cpu_count() or 1, help="of each engine")
    parser.add_argument(
        "--deadline-s", type=_above_0, help="of a request (default: four times what the slowest one takes alone)"
    )
    parser.add_argument("--page", type=Path, default=Path("out/bench-day.html"), help="to write (out/bench-day.html)")
    values = vars(parser.parse_args(arguments))
    if _ALL_ROWS in values["rows"]:
        values["rows"] = list(LABELS)
    return DayOptions(**values)


def _above_0(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
