"""Where do edits go by the gateway's policy, against balancing by requests and by masked tokens?

Latencies of a simulated fleet of 8 to 64 workers, and what the real scheduler's decisions take. Turns take what was
measured of the bench model in this run; masks are those of the papers' data sets, and templates as popular as
InstGenIE's. Arrivals are Poisson's, the same ones for every side, at .9 of what the fleet can do.

A run takes 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from load.bench.bench_model import write_bench_model
from load.bench.edit_model import EDIT_SHAPE
from load.bench.framework import CORES, Bench, Option, Row, Sheet, percentile
from load.bench.scheduling_decisions import decision_times_s
from load.bench.scheduling_fleet import (
    FleetCosts,
    MaskedTokens,
    Policy,
    RequestCount,
    SimulatedEdit,
    SimulatedFleet,
    TurnCosts,
    measured_costs,
)
from load.replay.trace_shape import TRACES, MaskRatios, TemplatePopularity

WORKERS = (8, 16, 32, 64)
LOAD = 0.9
WANTED_REDUCTION, WANTED_DECISION_MS, WANTED_R2 = 0.26, 1.0, 0.99
# Tokens around a mask, as a share of all: what a margin of one token adds to a small mask of 32 x 32 tokens.
_MARGIN = 0.02
# Share of the first edits, for which the fleet is not full yet.
_WARM_UP = 0.1
BENCH = Bench(
    __file__,
    __doc__,
    Option("--edits-per-worker", 100, "of each run", smallest=3),
    Option("--steps", 20, "of each edit", smallest=5),
    Option("--looks", 2000, "of the scheduler that are measured", smallest=20),
    Option("--rounds", 2, "of the turns that costs are fitted to", smallest=1),
    Option("--threads", 2, "of the engine that is measured"),
    Option("--only-decisions", False, "leave the simulated fleets out"),
    exclusive_cores=True,
)

Balancers = type[RequestCount] | type[Policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """p95 latencies of one fleet and one kind of masks, in seconds."""

    workers: int
    masks: str
    per_s: float
    requests_s: float
    tokens_s: float
    policy_s: float

    @property
    def reduction(self) -> float:
        """The share that is saved against balancing by requests."""
        return 1.0 - self.policy_s / self.requests_s

    @property
    def vs_tokens(self) -> float:
        """The share that is saved against balancing by masked tokens."""
        return 1.0 - self.policy_s / self.tokens_s

    @property
    def row(self) -> Row:
        """The row for people."""
        return (
            f"{self.workers} workers, {self.masks} masks, {self.per_s:.2f} edits/s: p95 by requests, tokens, policy",
            f"{self.requests_s:.1f} s, {self.tokens_s:.1f} s, {self.policy_s:.1f} s",
            f"-{100 * self.reduction:.0f} %, -{100 * self.vs_tokens:.0f} %",
        )


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure the costs of turns, simulate all fleets, and measure decisions."""
    if not options.only_decisions:
        print("measures what turns cost", flush=True)
        write_bench_model(folder / "model", EDIT_SHAPE.for_run(smallest=options.smallest))
        turns = measured_costs(folder / "model", threads=options.threads, rounds=options.rounds)
        _fill_fleets(sheet, turns, _compare_all(FleetCosts(turns=turns), options))
    times_ms = [1e3 * seconds for seconds in decision_times_s(looks=options.looks)]
    what = "a decision, 64 workers and 1,000 queued, p50"
    sheet.figure(what, percentile(times_ms, 0.5), "{:.2f} ms", key="decision_p50_ms")
    p99, bar = percentile(times_ms, 0.99), f"at most {WANTED_DECISION_MS:g} ms"
    sheet.figure("    p99", p99, "{:.2f} ms", key="decision_p99_ms", bar=bar)


def _compare_all(costs: FleetCosts, options: argparse.Namespace) -> list[Compared]:
    """Compare every fleet with every kind of masks, as many at a time as there are cores; the largest fleets begin."""
    fleets = [(WORKERS[0], TRACES[0])] if options.smallest else list(itertools.product(WORKERS, TRACES))
    # Begun anew, not forked: the engine that was measured has left threads in this process.
    with ProcessPoolExecutor(CORES, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {
            (workers, masks): pool.submit(compare, workers, masks, costs, options)
            for workers, masks in reversed(fleets)
        }
        for done in as_completed(running.values()):
            print("{}: {}".format(*done.result().row), flush=True)
        return [running[fleet].result() for fleet in fleets]


def compare(workers: int, masks: MaskRatios, costs: FleetCosts, options: argparse.Namespace) -> Compared:
    """Run all three balancers at the same arrivals."""
    count = options.edits_per_worker * workers
    per_s = LOAD * _capacity_per_s(workers, masks, costs, options)

    def p95_s(side: Balancers) -> float:
        fleet = SimulatedFleet(workers, costs)
        took_s = fleet.run(_edits(count, per_s, masks, options.steps), side(fleet))
        return percentile(took_s[int(_WARM_UP * count) :], 0.95)

    return Compared(
        workers=workers,
        masks=masks.name,
        per_s=per_s,
        requests_s=p95_s(RequestCount),
        tokens_s=p95_s(MaskedTokens),
        policy_s=p95_s(Policy),
    )


def _capacity_per_s(workers: int, masks: MaskRatios, costs: FleetCosts, options: argparse.Namespace) -> float:
    """Return edits per second of a fleet whose queue is never empty: the better one of two balancers'."""
    count = 40 * workers

    def per_s(side: Balancers) -> float:
        fleet = SimulatedFleet(workers, costs)
        took_s = sorted(fleet.run(_edits(count, 0.0, masks, options.steps), side(fleet)))
        first, last = count // 10, count * 8 // 10
        return (last - first) / (took_s[last] - took_s[first])

    return max(per_s(RequestCount), per_s(Policy))


def _edits(count: int, per_s: float, masks: MaskRatios, steps: int) -> list[SimulatedEdit]:
    """Return the same edits for the same masks; with 0 a second, all come at once."""
    chance = random.Random(f"{masks.name} {count}")
    shares, templates = masks.draw(chance), TemplatePopularity().draw(chance)
    at_s = itertools.accumulate(chance.expovariate(per_s) if per_s else 0.0 for _ in range(count))
    return [
        SimulatedEdit(number=number, at_s=at, computed_share=min(1.0, share + _MARGIN), template=place, steps=steps)
        for number, (at, share, place) in enumerate(zip(at_s, shares, templates, strict=False))
    ]


def _fill_fleets(sheet: Sheet, turns: TurnCosts, compared: Sequence[Compared]) -> None:
    for each in compared:
        sheet.row(*each.row)
    reductions, vs_tokens = [each.reduction for each in compared], [each.vs_tokens for each in compared]
    bar = f"at least {WANTED_REDUCTION:g}"
    sheet.figure("median over all", median(reductions), key="p95_reduction", bar=bar)
    sheet.figure("least of all", min(reductions), key="least_p95_reduction")
    sheet.figure("the same against tokens", median(vs_tokens), key="vs_tokens", bar="above 0")
    what, bar = "fit of the costs, R^2 over turns held out", f"at least {WANTED_R2:g}"
    sheet.figure(what, turns.r2, "{:.3f}", key="costs_r2", bar=bar)
    sheet.values |= {"least_vs_tokens": min(vs_tokens), "turn_s": turns.turn_s, "row_s": turns.row_s}
    sheet.values["fixed_share"] = turns.fixed_share


if __name__ == "__main__":
    sys.exit(BENCH.command())
