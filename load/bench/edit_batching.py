"""What joining and leaving the batch at every step gains edits: the engine against static batches of the same engine,
and against one that decodes and encodes images between its steps.

The bench model of edits, masked blocks and sparse convolutions on every side, and one process, by turns. Poisson
arrivals at .7 of what full static batches get through, masks as in production, and step counts mixed as 20, 30 and 50
are. The clock is that of edit_queue: idle time is not waited for.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from bottega.diffusion.engine.engine import Engine
from bottega.diffusion.engine.limits import EngineLimits
from load.bench.bench_model import write_bench_model
from load.bench.edit_desk import EditDesk
from load.bench.edit_model import EDIT_SHAPE
from load.bench.edit_queue import MAX_BATCH, Arriving, Served, StaticBatches, serve, step_by_step
from load.bench.exclusive_cores import begin_with_exclusive_cores
from load.bench.report import percentile, report
from load.bench.scratch import scratch
from load.bench.typical_arrivals import typical_arrivals
from load.replay.mask_ratios import TRACES, MaskRatios

THREADS = 2
LOAD = 0.7
# What decoding an edit's images takes, and what encoding its picture takes, of what the edit takes alone: InstGenIE's
# interruptions of .36 s beside edits of 2.2 s.
CODEC_SHARE = 0.16
WANTED = {"static_p95_ratio": 1.35, "strawman_p95_ratio": 1.4}
_FAR_APART_S = 1e4
_ALONE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One trace. capacity_per_s: edits that full static batches get through. edit_s: of one alone.

    static, engine, strawman: seconds of each edit from its arrival on; of the first two without images' codecs.
    """

    name: str
    capacity_per_s: float
    edit_s: float
    static: Sequence[float]
    engine: Sequence[float]
    strawman: Sequence[float]

    @property
    def beside(self) -> list[float]:
        """The engine's, with images decoded before and encoded after, by somebody else."""
        return [each + 2 * CODEC_SHARE * self.edit_s for each in self.engine]

    def alone(self, seconds: Sequence[float]) -> list[float]:
        """In times of what an edit takes alone, so that traces compare."""
        return [each / self.edit_s for each in seconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """share: of the tokens, that its mask has. steps: that it asks for; one less runs."""

    share: float
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
        """The same edits each time."""
        chance = random.Random(seed)
        return [
            Arriving(at_s=when, order=self._desk.order(number, edit.share, chance, edit.steps))
            for number, (when, edit) in enumerate(zip(at_s, edits, strict=True))
        ]

    def static(self, arriving: Sequence[Arriving]) -> Served:
        """In static batches."""
        return serve(self._static, arriving, self._batches, together=True)

    def joining(self, arriving: Sequence[Arriving], *, stall_s: float = 0.0) -> Served:
        """Joining at every step; each join and each leave holds all of them up for stall_s."""
        return serve(self.engine, arriving, step_by_step, stall_s=stall_s)


def measure(sides: Sides, trace: MaskRatios, options: argparse.Namespace) -> Round:
    """Capacity, an edit alone, and then the sides by turns."""
    chance = random.Random(trace.name)
    shares = itertools.islice(trace.draw(chance), options.requests)
    edits = [Edit(share=share, steps=chance.choice(options.steps)) for share in shares]
    full = [0.0] * MAX_BATCH
    sides.static(sides.arriving([0.0] * 2, _some(edits, 0)[:2], 1))  # pays for what is made once
    batches = [
        sides.static(sides.arriving(full, _some(edits, number * MAX_BATCH), number))
        for number in range(options.batches)
    ]
    capacity_per_s = MAX_BATCH / mean(each.busy_s for each in batches)
    apart = [number * _FAR_APART_S for number in range(_ALONE)]
    edit_s = mean(sides.joining(sides.arriving(apart, _some(edits, 0)[:_ALONE], 2)).took_s)
    at_s = typical_arrivals(LOAD * capacity_per_s, options.requests, capacity_per_s=capacity_per_s, seed=trace.name)
    took: dict[str, Sequence[float]] = {}
    for side in ("static", "engine", "strawman"):
        arriving = sides.arriving(at_s, edits, 3)
        if side == "static":
            took[side] = sides.static(arriving).took_s
        else:
            stall_s = CODEC_SHARE * edit_s if side == "strawman" else 0.0
            took[side] = sides.joining(arriving, stall_s=stall_s).took_s
    return Round(name=trace.name, capacity_per_s=capacity_per_s, edit_s=edit_s, **took)


def _some(edits: Sequence[Edit], first: int) -> list[Edit]:
    """A batch of them, from one on, and round again."""
    return [edits[(first + number) % len(edits)] for number in range(MAX_BATCH)]


def values_of(rounds: Sequence[Round]) -> dict[str, float]:
    """What the line of JSON says."""

    def ratio(these: Sequence[Round], side: str, ours: str) -> float:
        theirs = [each for one in these for each in one.alone(getattr(one, side))]
        own = [each for one in these for each in one.alone(getattr(one, ours))]
        return percentile(theirs, 0.95) / percentile(own, 0.95)

    values = {
        "static_p95_ratio": ratio(rounds, "static", "engine"),
        "strawman_p95_ratio": ratio(rounds, "strawman", "beside"),
    }
    for one in rounds:
        values |= {
            f"static_p95_ratio_{one.name}": ratio([one], "static", "engine"),
            f"strawman_p95_ratio_{one.name}": ratio([one], "strawman", "beside"),
            f"static_p50_ratio_{one.name}": median(one.static) / median(one.engine),
            f"capacity_per_s_{one.name}": one.capacity_per_s,
            f"edit_s_{one.name}": one.edit_s,
        }
    return values | {"requests": float(sum(len(one.engine) for one in rounds))}


def table_of(rounds: Sequence[Round], values: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """What people read."""
    rows = []
    for one in rounds:
        rows.append((f"{one.name}: an edit alone", f"{one.edit_s:.2f} s", ""))
        rows.append(("    full static batches", f"{one.capacity_per_s:.3f} edits/s", ""))
        for side in ("static", "engine", "strawman", "beside"):
            seconds = getattr(one, side)
            said = f"{median(seconds):.2f} s, {percentile(seconds, 0.95):.2f} s"
            rows.append((f"    {_SAID[side]}: p50, p95", said, ""))
    for key, wanted in WANTED.items():
        rows.append((f"p95 over the engine's, all edits ({key})", f"{values[key]:.2f}", f"at least {wanted:g}"))
    return rows


_SAID = {
    "static": "static batches",
    "engine": "the engine",
    "strawman": "codecs in the loop",
    "beside": "the engine, codecs beside it",
}


def main() -> None:
    """Prints the table and the line of JSON."""
    options = _options()
    with scratch() as folder:
        write_bench_model(folder / "model", EDIT_SHAPE)
        rounds = measure_all(folder / "model", options)
    values = values_of(rounds)
    report("edit_batching", table_of(rounds, values), values)


def measure_all(model: Path, options: argparse.Namespace) -> list[Round]:
    """All traces."""
    sides = Sides(EditDesk(model, steps=options.steps, threads=options.threads))
    return [measure(sides, trace, options) for trace in TRACES if trace.name in options.traces]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-edit-batching", description=__doc__)
    names = [trace.name for trace in TRACES]
    parser.add_argument("--traces", nargs="+", default=names, choices=names, help="of mask ratios (default: all)")
    parser.add_argument("--requests", type=int, default=20, help="of each trace, on each side (default: 20)")
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[3, 4, 6], help="that edits have, mixed; one less runs (default: 3 4 6)"
    )
    parser.add_argument("--batches", type=int, default=1, help="that capacity is measured with (default: 1)")
    parser.add_argument("--threads", type=int, default=THREADS, help="of torch (default: 2)")
    return parser.parse_args()


if __name__ == "__main__":
    begin_with_exclusive_cores()
    main()
