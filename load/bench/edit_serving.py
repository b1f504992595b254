"""Edits served by the suite against Diffusers' inpainting, one by one from a queue: latencies at the same arrivals, and
capacity.

Capacity comes from the suite, a gateway and a worker as processes, with clients that wait for each picture. Latencies
come from the same engine in this process, on the clock of edit_queue, with what the suite takes beside its engine added
to each: so idle time is not waited for, and there are enough arrivals for a p95. A queue whose server takes one edit at
a time is computed from what Diffusers' edits took in this run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from bottega.client import AsyncClient
from bottega.diffusion.engine.limits import EngineLimits
from load.bench.bench_model import write_bench_model
from load.bench.edit_desk import EditDesk
from load.bench.edit_model import EDIT_SHAPE
from load.bench.edit_queue import Arriving, serve, step_by_step
from load.bench.edit_steps import EditAsk, Side
from load.bench.edit_suite import TIMEOUT_S, EditSuite, running
from load.bench.exclusive_cores import begin_with_exclusive_cores
from load.bench.report import percentile, report
from load.bench.scratch import scratch
from load.bench.typical_arrivals import one_by_one, typical_arrivals
from load.replay.mask_ratios import PUBLIC

THREADS = 2
CLIENTS = 8
# Of Diffusers' capacity, and of the requests that come at it: a p95 at full load grows with their number for Diffusers.
LOADS = {0.8: 1.0, 1.0: 2.5}
WANTED = {
    "p95_reduction_80": 0.6,
    "p95_reduction_100": 0.88,
    "throughput_ratio": 2.2,
    "throughput_ratio_sparse": 3.0,
}
_FAR_APART_S = 1e4


@dataclass(slots=True, kw_only=True)
class Measured:
    """Seconds, and edits per second.

    diffusers: of single edits; long: of those with the steps of the capacities. per_s: through the suite, with
    convolutions in full (False) and sparse. alone: of single edits through the suite, and engine_alone of the same ones
    in an engine. theirs, ours: latencies, by load.
    """

    diffusers: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)
    per_s: dict[bool, float] = field(default_factory=dict)
    alone: list[float] = field(default_factory=list)
    engine_alone: list[float] = field(default_factory=list)
    theirs: dict[float, list[float]] = field(default_factory=dict)
    ours: dict[float, list[float]] = field(default_factory=dict)

    @property
    def added_s(self) -> float:
        """What the suite takes beside its engine."""
        return max(0.0, median(self.alone) - median(self.engine_alone))

    def reduction(self, load: float) -> float:
        """Of the p95, what is saved; 0 to 1."""
        own = [each + self.added_s for each in self.ours[load]]
        return 1.0 - percentile(own, 0.95) / percentile(self.theirs[load], 0.95)


async def _through_suite(address: str, theirs: Side, measured: Measured, options: argparse.Namespace) -> float:
    """Edits per second, Diffusers before and after; and edits alone."""
    async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
        suite = EditSuite(client, options.capacity_steps)
        await suite.record()
        shares = _shares(options.capacity_edits, "capacity")
        await suite.per_s(shares[:2], CLIENTS)  # pays for what is made once
        measured.long += await asyncio.to_thread(_diffusers, theirs, options.capacity_steps, options)
        per_s = await suite.per_s(shares, CLIENTS)
        measured.long += await asyncio.to_thread(_diffusers, theirs, options.capacity_steps, options)
        short = EditSuite(client, options.steps)
        await short.record()  # other timesteps
        measured.alone = await short.alone(_shares(options.alone_edits, "alone"))
    return per_s


def _capacity(model: Path, folder: Path, theirs: Side, measured: Measured, options: argparse.Namespace) -> None:
    """With convolutions in full, and then with sparse ones."""
    for sparse in (False, True):
        with running(model, folder / f"{sparse=}", threads=options.threads, sparse=sparse) as address:
            measured.per_s[sparse] = asyncio.run(_through_suite(address, theirs, measured, options))


def _diffusers(theirs: Side, steps: int, options: argparse.Namespace) -> list[float]:
    """Some edits: their masks do not matter to it."""
    asks = (EditAsk(share=share, steps=steps) for share in _shares(options.reference_edits, "reference"))
    return [theirs.edit(ask).seconds for ask in asks]


def _in_engine(model: Path, theirs: Side, measured: Measured, options: argparse.Namespace) -> None:
    """Latencies at the same arrivals, by load."""
    desk = EditDesk(model, steps=(options.steps,), threads=options.threads)
    engine = desk.engine(EngineLimits())
    desk.record(engine)

    def ours(at_s: Sequence[float], what: str) -> list[float]:
        shares, chance = _shares(len(at_s), what), random.Random(what)
        orders = [desk.order(number, share, chance, options.steps) for number, share in enumerate(shares)]
        arriving = [Arriving(at_s=when, order=order) for when, order in zip(at_s, orders, strict=True)]
        return list(serve(engine, arriving, step_by_step).took_s)

    ours([0.0] * 4, "warm")
    measured.engine_alone = ours([number * _FAR_APART_S for number in range(options.alone_edits)], "alone")
    for load, times in LOADS.items():
        measured.diffusers += _diffusers(theirs, options.steps, options)
        capacity_per_s = 1.0 / mean(measured.diffusers)
        count = round(times * options.requests)
        at_s = typical_arrivals(load * capacity_per_s, count, capacity_per_s=capacity_per_s)
        measured.ours[load] = ours(at_s, f"load {load}")
        measured.theirs[load] = one_by_one(at_s, itertools.cycle(measured.diffusers))


def _shares(count: int, what: str) -> list[float]:
    """Of masks, the same ones every time for the same use."""
    return list(itertools.islice(PUBLIC.draw(random.Random(what)), count))


def values_of(measured: Measured) -> dict[str, float]:
    """What the line of JSON says."""
    diffusers_s = mean(measured.diffusers)
    values = {f"p95_reduction_{round(100 * load)}": measured.reduction(load) for load in measured.ours}
    for sparse, per_s in measured.per_s.items():
        values["throughput_ratio_sparse" if sparse else "throughput_ratio"] = per_s * mean(measured.long)
    for load in measured.ours:
        name = round(100 * load)
        values |= {
            f"diffusers_p95_s_{name}": percentile(measured.theirs[load], 0.95),
            f"engine_p95_s_{name}": percentile(measured.ours[load], 0.95),
        }
    return values | {
        "diffusers_s": diffusers_s,
        "suite_alone_s": median(measured.alone),
        "engine_alone_s": median(measured.engine_alone),
        "suite_added_s": measured.added_s,
    }


def _rows(values: dict[str, float]) -> list[tuple[str, str, str]]:
    """What people read."""
    rows = [
        ("an edit alone, Diffusers", f"{values['diffusers_s']:.2f} s", ""),
        ("    the suite, sparse convolutions", f"{values['suite_alone_s']:.2f} s", ""),
        ("    of which beside its engine", f"{values['suite_added_s']:.2f} s", ""),
    ]
    for load in LOADS:
        name = round(100 * load)
        said = f"{values[f'diffusers_p95_s_{name}']:.1f} s, {values[f'engine_p95_s_{name}']:.2f} s"
        rows.append((f"p95 at {load:g} of Diffusers' capacity, Diffusers and the engine", said, ""))
    for key, wanted in WANTED.items():
        rows.append((key, f"{values[key]:.3f}", f"at least {wanted:g}"))
    return rows


def main() -> None:
    """Prints the table and the line of JSON."""
    options = _options()
    measured = Measured()
    with scratch() as folder:
        model = folder / "model"
        write_bench_model(model, EDIT_SHAPE)
        with Side("diffusers", model, options.threads) as theirs:
            _diffusers(theirs, options.steps, options)  # pays for what is made once
            _capacity(model, folder, theirs, measured, options)
            _in_engine(model, theirs, measured, options)
    values = values_of(measured)
    report("edit_serving", _rows(values), values)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-edit-serving", description=__doc__)
    parser.add_argument("--requests", type=int, default=40, help="at .8; 2.5 times as many at full load (default: 40)")
    parser.add_argument("--steps", type=int, default=5, help="of these edits; one less runs (default: 5)")
    parser.add_argument("--capacity-edits", type=int, default=10, help="of each capacity (default: 10)")
    parser.add_argument("--capacity-steps", type=int, default=10, help="of these edits (default: 10)")
    parser.add_argument("--alone-edits", type=int, default=3, help="through the suite, one by one (default: 3)")
    parser.add_argument("--reference-edits", type=int, default=1, help="of Diffusers, each time (default: 1)")
    parser.add_argument("--threads", type=int, default=THREADS, help="of torch, on each side (default: 2)")
    return parser.parse_args()


if __name__ == "__main__":
    begin_with_exclusive_cores()
    main()
