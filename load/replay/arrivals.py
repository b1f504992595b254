"""When requests come: at random, in one process for all degrees of burstiness, or as a trace has them.

A curve, as a day has one, and bursts on top of it change the rate over a run. A trace is a CSV file with a column of
times, as published traces and logs of services are.
"""

from __future__ import annotations

import csv
import itertools
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, ClassVar, TextIO

from pydantic import ConfigDict, Field

from bottega.errors import ConfigError
from bottega.strict import STRICT

MAX_ROWS = 1_000_000
_COLUMNS = ("at_s", "timestamp")

Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstShape:
    """Bursts, one in each part of a run. The run's rate is that of all of it, bursts included."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    times: Annotated[float, Field(ge=1)] = 10.0
    """As many requests as between bursts."""
    length_s: Seconds = 5.0
    """Seconds of a burst."""
    every_s: Seconds = 60.0
    """Seconds of a part, with one burst somewhere in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalShape:
    """How the requests of a run come."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    burstiness: Annotated[float, Field(gt=0, le=16)] = 1.0
    """Coefficient of variation of the times between requests, which are Gamma distributed, as in papers on serving.

    1 is Poisson's process; with 4 or 8 many come at once, and then none for long.
    """
    curve: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Requests a second by equally long parts of the run, relative to each other, as 24 for a day; none is constant."""
    bursts: BurstShape | None = None
    """Parts of the run in which more come."""
    trace: Path | None = None
    """A file whose times are replayed instead (see `read_times`): its bursts are its own, and only its pace changes."""


def gaps_s(rate_per_s: float, chance: random.Random, *, burstiness: float = 1.0) -> Iterator[float]:
    """Yield seconds from one request to the next, without end.

    Args:
        rate_per_s: Requests a second on average.
        chance: The source of randomness.
        burstiness: As in ArrivalShape.
    """
    shape = burstiness**-2
    while True:
        yield chance.gammavariate(shape, 1.0 / (rate_per_s * shape))


def poisson(rate_per_s: float, count: int, chance: random.Random) -> list[float]:
    """Return the times of so many requests at random, `rate_per_s` on average."""
    return list(itertools.accumulate(itertools.islice(gaps_s(rate_per_s, chance), count)))


def arrival_times(shape: ArrivalShape, *, rate_per_s: float, length_s: float, chance: random.Random) -> list[float]:
    """Return the times of the requests of a run of that length: `rate_per_s` on average, to the request.

    A process is drawn for one number of requests and filled into the run exactly, so that runs of all shapes offer the
    same load: for Poisson's these are its arrivals, given their number. Of a trace the first ones are taken, and if it
    has fewer, the run is shorter.

    Raises ConfigError for a trace that cannot be used, and where not one request would come.
    """
    count = round(rate_per_s * length_s)
    if count < 1:
        raise ConfigError(f"{rate_per_s:g} requests a second for {length_s:g} s are none")
    if shape.trace is None:
        intensity = Intensity.of(shape.curve, shape.bursts, length_s=length_s, chance=chance)
        return intensity.times(_places(count, shape.burstiness, chance))
    if shape.curve or shape.bursts or shape.burstiness != ArrivalShape().burstiness:
        raise ConfigError("a trace has its own bursts: burstiness, curve and bursts do not go with it")
    times = read_times(shape.trace)[:count]
    if not times[-1]:
        raise ConfigError(f"{shape.trace} has all of its first {len(times)} requests at one time")
    # The last one comes one mean gap before the end.
    pace = (len(times) - 1) / rate_per_s / times[-1]
    return [at_s * pace for at_s in times]


def _places(count: int, burstiness: float, chance: random.Random) -> list[float]:
    """Return the places of so many requests in the run, in 0 to 1; the last gap is from the last one to its end."""
    gaps = list(itertools.islice(gaps_s(1.0, chance, burstiness=burstiness), count + 1))
    whole = sum(gaps)
    # What rounding adds must not reach the end.
    return [min(place / whole, 1.0 - 1e-12) for place in itertools.accumulate(gaps[:-1])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intensity:
    """Pieces of a run, each with a constant rate."""

    edges: tuple[float, ...]
    """Seconds, one more than weights."""
    weights: tuple[float, ...]
    """Relative rates."""

    @classmethod
    def of(
        cls, curve: Sequence[float], bursts: BurstShape | None, *, length_s: float, chance: random.Random
    ) -> Intensity:
        """Return the pieces of a curve, whose weights are of equally long parts, with bursts.

        Raises ConfigError for shapes that make no rate.
        """
        parts = [*curve] or [1.0]
        if not any(parts):
            raise ConfigError("arrivals.curve: all parts are 0, so that no request could come")
        burst_at = _bursts(bursts, length_s, chance) if bursts else []
        edges = {0.0, length_s, *(length_s * number / len(parts) for number in range(1, len(parts)))}
        edges |= {min(edge, length_s) for burst in burst_at for edge in burst}
        ordered = sorted(edges)
        weights = []
        for first, last in itertools.pairwise(ordered):
            middle = (first + last) / 2
            weight = parts[min(int(middle / length_s * len(parts)), len(parts) - 1)]
            in_burst = any(begin <= middle < end for begin, end in burst_at)
            weights.append(weight * bursts.times if bursts and in_burst else weight)
        return cls(edges=tuple(ordered), weights=tuple(weights))

    def times(self, places: Sequence[float]) -> list[float]:
        """Return the seconds at which those shares of all requests, 0 to below 1, have come."""
        masses = [
            (last - first) * weight
            for (first, last), weight in zip(itertools.pairwise(self.edges), self.weights, strict=True)
        ]
        reached = [0.0, *itertools.accumulate(masses)]
        times = []
        for place in places:
            mass = place * reached[-1]
            piece = bisect_right(reached, mass) - 1  # one with a weight, as less than all of the mass is wanted
            times.append(self.edges[piece] + (mass - reached[piece]) / self.weights[piece])
        return times


def _bursts(shape: BurstShape, length_s: float, chance: random.Random) -> list[tuple[float, float]]:
    """Return the begin and end of each burst."""
    if shape.length_s >= shape.every_s:
        raise ConfigError(
            f"arrivals.bursts: one of {shape.length_s:g} s every {shape.every_s:g} s is no burst: length_s must be less"
        )
    if length_s < shape.length_s:
        raise ConfigError(
            f"arrivals.bursts: a run of {length_s:g} s is shorter than one burst of {shape.length_s:g} s: "
            "make it longer, or give --no-bursts"
        )
    found = []
    begin_s = 0.0
    while begin_s < length_s:
        room_s = min(shape.every_s, length_s - begin_s) - shape.length_s
        if room_s >= 0:
            at_s = begin_s + chance.uniform(0.0, room_s)
            found.append((at_s, at_s + shape.length_s))
        begin_s += shape.every_s
    return found


def read_times(path: Path) -> list[float]:
    """Return the seconds of a file's requests from the first one on, in order.

    The first line names the columns. One of them is at_s, seconds from anywhere, or timestamp, seconds or ISO 8601;
    others are ignored. The rows need not be in order.

    Raises ConfigError with the file, the line and what is wrong with it.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            times = sorted(_times(path, file))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not CSV: {error}") from None
    if not times:
        raise ConfigError(f"{path} has no requests")
    return [each - times[0] for each in times]


def _times(path: Path, file: TextIO) -> Iterator[float]:
    rows = csv.reader(file)
    heads = [head.strip().lower() for head in next(rows, [])]
    column = next((heads.index(name) for name in _COLUMNS if name in heads), None)
    if column is None:
        raise ConfigError(f"{path} must name its columns in the first line, one of them at_s or timestamp")
    for number, row in enumerate(rows):
        if number >= MAX_ROWS:
            raise ConfigError(f"{path} has more than {MAX_ROWS:,} requests: take a part of it")
        if row:
            yield _seconds(f"{path}, line {rows.line_num}", row[column] if column < len(row) else "")


def _seconds(where: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return _seconds_of_date(where, text)
    if not abs(seconds) < 1e12:
        raise ConfigError(f"{where}: {text!r} is no number of seconds")
    return seconds


def _seconds_of_date(where: str, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(f"{where}: {text[:40]!r} is neither seconds nor a time of ISO 8601") from None
    # Without a zone all of them are in the same one: only differences count.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
