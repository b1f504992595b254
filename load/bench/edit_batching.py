"""What does joining and leaving the batch at every step gain edits?

The engine against static batches of the same engine, and against one that decodes and encodes images between its steps.
The bench model of edits, masked blocks and sparse convolutions on every side, and one process, by turns. Poisson
arrivals at .7 of what full static batches get through, masks as in production, and step counts mixed as 20, 30 and 50
are. The clock is that of edit_queue: idle time is not waited for.

A run takes 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from bottega.engine.engine import Engine
from bottega.engine.limits import EngineLimits
from load.bench.bench_model import write_bench_model
from load.bench.edit_model import EDIT_SHAPE
from load.bench.edit_queue import MAX_BATCH, Arriving, EditDesk, Served, StaticBatches, serve, step_by_step
from load.bench.framework import Bench, Option, Sheet, percentile
from load.bench.typical_arrivals import typical_arrivals
from load.replay.trace_shape import TRACES, MaskRatios

LOAD = 0.7
# What decoding an edit's images takes, and what encoding its picture takes, of what the edit takes alone: InstGenIE's
# interruptions of .36 s beside edits of 2.2 s.
CODEC_SHARE = 0.16
WANTED = {"static_p95_ratio": 1.35, "strawman_p95_ratio": 1.4}
_FAR_APART_S = 1e4
_ALONE = 4
_NAMES = [trace.name for trace in TRACES]
BENCH = Bench(
    __file__,
    __doc__,
    Option("--traces", _NAMES, "of mask ratios", choices=_NAMES, smallest=_NAMES[:1]),
    Option("--requests", 20, "of each trace, on each side", smallest=4),
    Option("--steps", [3, 4, 6], "that edits have, mixed; one less runs", smallest=[3]),
    Option("--batches", 1, "that capacity is measured with"),
    Option("--threads", 2, "of torch"),
    exclusive_cores=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A trace of mask ratios."""

    name: str
    capacity_per_s: float
    """Edits that full static batches get through."""
    edit_s: float
    """Seconds of an edit alone."""
    static: Sequence[float]
    """Seconds of each edit from its arrival, in static batches; without images' codecs."""
    engine: Sequence[float]
    """The same of the engine."""
    strawman: Sequence[float]
    """The same of the engine with codecs between its steps."""

    @property
    def beside(self) -> list[float]:
        """The engine's, with images decoded before and encoded after by another process."""
        return [each + 2 * CODEC_SHARE * self.edit_s for each in self.engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """An edit to draw."""

    share: float
    """Share of the tokens that its mask has."""
    steps: int


class Sides:
    """The engine that is measured, and one that runs static batches, over the same model and the same recording."""

    def __init__(self, desk: EditDesk) -> None:
        self._desk = desk
        self._batches = StaticBatches()
        self.engine: Engine = desk.engine(EngineLimits())
        self._static: Engine = desk.engine(EngineLimits(max_wait_turns=0), (self._batches,))
        desk.record(self.engine)

    def arriving(self, at_s: Sequence[float], edits: Sequence[Edit], seed: int) -> list[Arriving]:
        """Return orders of these edits, the same for the same seed."""
        chance = random.Random(seed)
        return [
            Arriving(at_s=when, order=self._desk.order(number, edit.share, chance, edit.steps))
            for number, (when, edit) in enumerate(zip(at_s, edits, strict=True))
        ]

    def static(self, arriving: Sequence[Arriving]) -> Served:
        """Draw in static batches."""
        return serve(self._static, arriving, self._batches, together=True)

    def joining(self, arriving: Sequence[Arriving], *, stall_s: float = 0.0) -> Served:
        """Draw with joining at every step; each join and each leave holds all of them up for `stall_s`."""
        return serve(self.engine, arriving, step_by_step, stall_s=stall_s)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure every trace."""
    write_bench_model(folder / "model", EDIT_SHAPE.for_run(smallest=options.smallest))
    sides = Sides(EditDesk(folder / "model", steps=options.steps, threads=options.threads))
    fill(sheet, [_round(sides, trace, options) for trace in TRACES if trace.name in options.traces])


def _round(sides: Sides, trace: MaskRatios, options: argparse.Namespace) -> Round:
    """Measure the capacity, an edit alone, and then the sides by turns."""
    chance = random.Random(trace.name)
    shares = itertools.islice(trace.draw(chance), options.requests)
    edits = [Edit(share=share, steps=chance.choice(options.steps)) for share in shares]

    def some(count: int, first: int = 0) -> list[Edit]:
        return [edits[(first + number) % len(edits)] for number in range(count)]

    sides.static(sides.arriving([0.0] * 2, some(2), 1))  # pays for what is made once
    full = [0.0] * MAX_BATCH
    batches = [
        sides.static(sides.arriving(full, some(MAX_BATCH, number * MAX_BATCH), number))
        for number in range(options.batches)
    ]
    capacity_per_s = MAX_BATCH / mean(each.busy_s for each in batches)
    apart = [number * _FAR_APART_S for number in range(_ALONE)]
    edit_s = mean(sides.joining(sides.arriving(apart, some(_ALONE), 2)).took_s)
    at_s = typical_arrivals(LOAD * capacity_per_s, options.requests, capacity_per_s=capacity_per_s, seed=trace.name)
    return Round(
        name=trace.name,
        capacity_per_s=capacity_per_s,
        edit_s=edit_s,
        static=sides.static(sides.arriving(at_s, edits, 3)).took_s,
        engine=sides.joining(sides.arriving(at_s, edits, 3)).took_s,
        strawman=sides.joining(sides.arriving(at_s, edits, 3), stall_s=CODEC_SHARE * edit_s).took_s,
    )


def fill(sheet: Sheet, rounds: Sequence[Round]) -> None:
    """Report ratios of p95, in times of what an edit takes alone, so that traces compare."""

    def ratio(these: Sequence[Round], side: str, ours: str) -> float:
        theirs, own = (
            percentile([each / one.edit_s for one in these for each in getattr(one, name)], 0.95)
            for name in (side, ours)
        )
        return theirs / own

    for one in rounds:
        sheet.figure(f"{one.name}: an edit alone", one.edit_s, "{:.2f} s", key=f"edit_s_{one.name}")
        what = "    full static batches"
        sheet.figure(what, one.capacity_per_s, "{:.3f} edits/s", key=f"capacity_per_s_{one.name}")
        for side, label in {
            "static": "static batches",
            "engine": "the engine",
            "strawman": "codecs in the loop",
            "beside": "the engine, codecs beside it",
        }.items():
            seconds = getattr(one, side)
            sheet.row(f"    {label}: p50, p95", f"{median(seconds):.2f} s, {percentile(seconds, 0.95):.2f} s")
        sheet.values |= {
            f"static_p95_ratio_{one.name}": ratio([one], "static", "engine"),
            f"strawman_p95_ratio_{one.name}": ratio([one], "strawman", "beside"),
            f"static_p50_ratio_{one.name}": median(one.static) / median(one.engine),
        }
    found = {
        "static_p95_ratio": ratio(rounds, "static", "engine"),
        "strawman_p95_ratio": ratio(rounds, "strawman", "beside"),
    }
    for key, wanted in WANTED.items():
        sheet.figure("p95 over the engine's, all edits", found[key], key=key, bar=f"at least {wanted:g}")
    sheet.values["requests"] = float(sum(len(one.engine) for one in rounds))


if __name__ == "__main__":
    sys.exit(BENCH.command())
