"""What all benches share: options, a scratch folder, sides that take turns, and figures with their bars.

A bench is a module of this folder: its docstring is its question, and its `BENCH` measures the sides:

    BENCH = Bench(__file__, __doc__, Option("--rounds", 5, "of both sides", smallest=1))

    @BENCH.measure
    def measure(options, folder, sheet):
        seconds = by_turns({"theirs": ..., "ours": ...}, options.rounds)
        sheet.figure("theirs over ours", ..., key="ratio", bar="at least 1.2")

`make bench-NAME ARGS=--smallest` runs as little as shows that the bench works. Its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import math
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, TypeVar

from bottega.client.types.models import EMBEDDED_MODEL
from bottega.model_files.folder_check import name_of
from bottega.process.engine_supervisor import engine_environment

RESULTS = Path(__file__).resolve().parents[1] / "results"
RECORD = "BENCH_RECORD"
"""Environment variable with the conditions of a run. Where it is set, the run is written to `RESULTS`."""
CORES = os.cpu_count() or 1
PROMPT = "a big red star on the left on a blue background"
GUIDANCE_SCALE = 5.0

_NUMBER = re.compile(r"-?[\d,]*\.?\d+")

T = TypeVar("T")
Row = tuple[str, str, str]
"""What was measured, the figure, and its bar or ""."""


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


def today() -> str:
    """Return the date of a run, as YYYY-MM-DD."""
    return dt.datetime.now(tz=dt.UTC).date().isoformat()


def missed(measured: str, wanted: str) -> bool:
    """Return whether a figure is on the wrong side of its bar; bars without a number are never missed."""
    figure, bar = _NUMBER.search(measured), _NUMBER.search(wanted)
    if figure is None or bar is None:
        return False
    value, bound = (float(number.group().replace(",", "")) for number in (figure, bar))
    if wanted.startswith(("at most", "<=")):
        return value > bound
    return wanted.startswith(("at least", "above", ">=")) and value < bound


@contextmanager
def scratch(inside: Path | None = None) -> Iterator[Path]:
    """Give a folder that is removed however the block ends, SIGTERM included.

    Args:
        inside: A folder on the disk to use, in place of the system's temporary one.
    """
    end_as_interrupted()
    with tempfile.TemporaryDirectory(prefix="bottega-bench-", dir=inside) as folder:
        yield Path(folder)


def end_as_interrupted() -> None:
    """Treat SIGTERM as Ctrl-C, so that started processes are stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def by_turns(sides: Mapping[str, Callable[[int], T]], rounds: int, *, warm_ups: int = 1) -> dict[str, list[T]]:
    """Run the sides in each round, in alternating order because the machine's speed drifts.

    Args:
        sides: Each is called with the number of the round.
        rounds: Rounds that count.
        warm_ups: Rounds before these, whose results are dropped.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(warm_ups + rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            result = sides[name](number)
            if number >= warm_ups:
                found[name].append(result)
    return found


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return what `work` returns, and its seconds."""
    began_s = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began_s


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    return timed(work)[1]


async def closed_loop(draw: Callable[[int], Awaitable[object]], *, requests: int, clients: int) -> float:
    """Return requests per second of clients that each start the next one when their last one is done.

    Args:
        draw: Draws the request of that number.
    """
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            await draw(number)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return requests / (time.perf_counter() - began)


class Sheet:
    """The figures of one run.

    Args:
        bench: Its name, as in `make bench-NAME`.
        heads: The titles of the second and the third column.
    """

    def __init__(self, bench: str, heads: tuple[str, str] = ("measured", "wanted")) -> None:
        self.bench = bench
        self.heads = heads
        self.rows: list[Row] = []
        self.values: dict[str, float] = {}
        self.parts: list[Sheet] = []
        """Sheets that are reported after this one, each under its own name."""

    def name_model(self, model: str) -> None:
        """Add a model to the bench's name, unless it is the one that is usually measured."""
        if model != EMBEDDED_MODEL:
            self.bench += f"-{name_of(model).removeprefix(f'{EMBEDDED_MODEL}-')}"

    def row(self, what: str, measured: str, wanted: str = "") -> None:
        """Add a line for people."""
        self.rows.append((what, measured, wanted))

    def figure(self, what: str, value: float, form: str = "{:.2f}", *, key: str, bar: str = "") -> None:
        """Add a figure for people and programs.

        Args:
            form: Format of the value for people.
            key: Its name in the JSON object; the row shows it in brackets.
            bar: Such as "at most 1.05".
        """
        self.row(f"{what} ({key})", form.format(value), bar)
        self.values[key] = value

    def report(self) -> None:
        """Print the figures, and record them where `BENCH_RECORD` is set."""
        self.show()
        if conditions := os.environ.get(RECORD):
            record(self.bench, self.rows, self._rounded, conditions=conditions)

    @property
    def _rounded(self) -> dict[str, float]:
        return {key: round(value, 4) for key, value in self.values.items()}

    def show(self) -> None:
        """Print the table and, as the last line, the JSON object."""
        table = [("", *self.heads), *self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        print(f"\n{self.bench}, on {machine()}")
        for what, measured, wanted in table:
            mark = "  MISSED" if missed(measured, wanted) else ""
            print(f"  {what:<{widths[0]}}  {measured:>{widths[1]}}  {wanted:>{widths[2]}}{mark}")
        print(json.dumps({"bench": self.bench, **self._rounded}), flush=True)


def record(
    bench: str,
    rows: Sequence[Row],
    values: Mapping[str, float],
    *,
    conditions: str,
    parts: Mapping[str, Any] = MappingProxyType({}),
    folder: Path = RESULTS,
) -> None:
    """Write a run to `folder`/BENCH.json, in place of the run that is there.

    Args:
        conditions: The run's arguments and what else the machine did.
        parts: What each part of the bench counted, if they may run on different days: an object with its `date` each.
    """
    dates = sorted({part["date"] for part in parts.values()} or {today()})
    run = {
        "bench": bench,
        "date": dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}",
        "machine": machine(),
        "conditions": conditions,
        "rows": [{"what": what.strip(), "measured": measured, "wanted": wanted} for what, measured, wanted in rows],
        "values": dict(values),
        **({"parts": dict(parts)} if parts else {}),
    }
    (folder / f"{bench}.json").write_text(json.dumps(run, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a bench. A list takes several values, and a bool is a switch."""

    flag: str
    default: Any
    help: str
    smallest: Any = None
    """The value of a smallest run; None is the default."""
    choices: Sequence[Any] | None = None
    kind: Callable[[str], Any] | None = None
    """Reads a value; by default the type of the default."""

    def add_to(self, parser: argparse.ArgumentParser, *, smallest: bool) -> None:
        """Add the option to a parser.

        Args:
            smallest: Whether the default is that of a smallest run.
        """
        default = self.default if self.smallest is None or not smallest else self.smallest
        if isinstance(self.default, bool):
            parser.add_argument(self.flag, action="store_true", default=default, help=self.help)
            return
        several = isinstance(self.default, list | tuple)
        kind = self.kind or type(self.default[0] if several else self.default)
        shown = " ".join(map(str, self.default)) if several else self.default
        parser.add_argument(
            self.flag,
            type=kind,
            nargs="+" if several else None,
            default=default,
            choices=self.choices,
            metavar=None if self.choices is None or kind is str else "N",
            help=f"{self.help} (default: {shown})" if shown not in {None, ""} else self.help,
        )


Measure = Callable[[argparse.Namespace, Path, Sheet], int | None]
"""Measures with the options and a scratch folder, and fills the sheet; returns the exit status, or None for 0."""


class Bench:
    """A bench as a command.

    Args:
        file: Of its module, whose name is the bench's.
        about: Its question.
        options: Beside `--smallest`.
        heads: See `Sheet`.
        exclusive_cores: Its own process computes while no other one does.
        inside: Name of the option with the folder in which the scratch folder is made.
    """

    def __init__(
        self,
        file: str,
        about: str | None,
        *options: Option,
        heads: tuple[str, str] = ("measured", "wanted"),
        exclusive_cores: bool = False,
        inside: str = "",
    ) -> None:
        self.name = Path(file).stem.replace("_", "-")
        self._about = about
        self._options = options
        self._heads = heads
        self._exclusive_cores = exclusive_cores
        self._inside = inside
        self._measure: Measure | None = None

    def measure(self, function: Measure) -> Measure:
        """Register the function that measures."""
        self._measure = function
        return function

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the options of a command line, by default this process's."""
        arguments = sys.argv[1:] if arguments is None else arguments
        parser = argparse.ArgumentParser(prog=f"make bench-{self.name}", description=self._about)
        parser.add_argument("--smallest", action="store_true", help="run as little as shows that it works")
        for option in self._options:
            option.add_to(parser, smallest="--smallest" in arguments)
        return parser.parse_args(arguments)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure and report; return the exit status."""
        assert self._measure is not None
        options = self.parse(arguments)
        sheet = Sheet(self.name, self._heads)
        with scratch(getattr(options, self._inside) if self._inside else None) as folder:
            status = self._measure(options, folder, sheet)
        for each in (sheet, *sheet.parts):
            if each.rows:
                each.report()
        return status or 0

    def command(self) -> int:
        """Run as a process of its own, which begins again where torch was imported without the right environment."""
        wanted = engine_environment(exclusive_cores=True) if self._exclusive_cores else {}
        if any(os.environ.get(name) != value for name, value in wanted.items()):
            os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})
        return self.main()


def medians(rounds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each side."""
    return {name: median(values) for name, values in rounds.items()}
