"""When requests come: at random, in one process for all degrees of burstiness, or as a trace says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.errors import ConfigError
from bottega.strict import STRICT
from load.replay.intensity import BurstShape, Intensity
from load.replay.trace_file import read_times


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalShape:
    """How requests of a run come.

    burstiness: coefficient of variation of the times between them, which are Gamma distributed, as usual in papers on
    serving: 1 is Poisson's process, with 4 or 8 many come at once and then nobody does for long.
    curve: requests a second by part of the run, relative to each other, all parts equally long: 24 numbers for the
    hours of a day; none is a constant rate. bursts: parts of the run in which more come.
    trace: of a file whose times are replayed instead (see trace_file); it has its own bursts, and
    its pace alone changes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    burstiness: Annotated[float, Field(gt=0, le=16)] = 1.0
    curve: tuple[Annotated[float, Field(ge=0)], ...] = ()
    bursts: BurstShape | None = None
    trace: Path | None = None


def gaps_s(rate_per_s: float, chance: random.Random, *, burstiness: float = 1.0) -> Iterator[float]:
    """Seconds from one request to the next, for ever; `rate_per_s` come on average. burstiness: as in ArrivalShape."""
    shape = burstiness**-2
    while True:
        yield chance.gammavariate(shape, 1.0 / (rate_per_s * shape))


def poisson(rate_per_s: float, count: int, chance: random.Random) -> list[float]:
    """When so many requests come at random, `rate_per_s` on average."""
    return list(itertools.accumulate(itertools.islice(gaps_s(rate_per_s, chance), count)))


def arrival_times(shape: ArrivalShape, *, rate_per_s: float, length_s: float, chance: random.Random) -> list[float]:
    """When the requests of a run of that length come: `rate_per_s` on average, to the request.

    A process is drawn for one number of requests and filled into the run exactly, so that runs of all shapes offer the
    same load: for Poisson's these are its arrivals, given how many there are. Of a trace the first ones are taken, and
    if it has fewer, the run is shorter.
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
    """When so many come, as shares of the whole run, the last gap being from the last one to its end."""
    gaps = list(itertools.islice(gaps_s(1.0, chance, burstiness=burstiness), count + 1))
    whole = sum(gaps)
    # What rounding adds must not reach the end.
    return [min(place / whole, 1.0 - 1e-12) for place in itertools.accumulate(gaps[:-1])]
