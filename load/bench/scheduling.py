"""Where edits go, by the gateway's policy, against balancing by requests and by masked tokens: latencies of a simulated
fleet of 8 to 64 workers, and what the real scheduler's decisions take.

Turns take what was measured of the bench model in this run; masks are those of the papers' data sets, and templates as
popular as InstGenIE's. Arrivals are Poisson's, the same ones for every side, at .9 of what the fleet can do.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import statistics
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from load.bench.exclusive_cores import begin_with_exclusive_cores
from load.bench.report import percentile, report
from load.bench.scheduling_costs import TurnCosts, measured
from load.bench.scheduling_decisions import decision_times_s
from load.bench.scheduling_fleet import FleetCosts, SimulatedEdit, SimulatedFleet
from load.bench.scheduling_sides import MaskedTokens, Policy, RequestCount
from load.replay.mask_ratios import TRACES, MaskRatios
from load.replay.template_popularity import TemplatePopularity

WORKERS = (8, 16, 32, 64)
LOAD = 0.9
WANTED_REDUCTION, WANTED_DECISION_MS, WANTED_R2 = 0.26, 1.0, 0.99
# Tokens around a mask, as a share of all: what a margin of one token adds to a small mask of 32 x 32 tokens.
_MARGIN = 0.02
# Of the first edits the fleet is not full yet.
_WARM_UP = 0.1


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
        """Against balancing by requests; 0 to 1."""
        return 1.0 - self.policy_s / self.requests_s

    @property
    def vs_tokens(self) -> float:
        """Against balancing by masked tokens."""
        return 1.0 - self.policy_s / self.tokens_s


def compare(workers: int, masks: MaskRatios, costs: FleetCosts, options: argparse.Namespace) -> Compared:
    """All three sides at the same arrivals."""
    count = options.edits_per_worker * workers
    per_s = LOAD * _capacity_per_s(workers, masks, costs, options)

    def p95_s(side: type[RequestCount] | type[Policy]) -> float:
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


def _compare_all(costs: FleetCosts, options: argparse.Namespace) -> list[Compared]:
    """Every fleet with every kind of masks, as many at a time as there are cores; the largest fleets begin."""
    kinds = list(itertools.product(WORKERS, TRACES))
    # Begun anew, not forked: the engine that was measured has left threads in this process.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {kind: pool.submit(compare, *kind, costs, options) for kind in reversed(kinds)}
        for done in as_completed(running.values()):
            what, took, _ = _row(done.result())
            print(f"{what}: {took}", flush=True)
        return [running[kind].result() for kind in kinds]


def _capacity_per_s(workers: int, masks: MaskRatios, costs: FleetCosts, options: argparse.Namespace) -> float:
    """Edits per second of a fleet whose queue is never empty: the better one of two sides'."""
    count = 40 * workers

    def per_s(side: type[RequestCount] | type[Policy]) -> float:
        fleet = SimulatedFleet(workers, costs)
        took_s = sorted(fleet.run(_edits(count, 0.0, masks, options.steps), side(fleet)))
        first, last = count // 10, count * 8 // 10
        return (last - first) / (took_s[last] - took_s[first])

    return max(per_s(RequestCount), per_s(Policy))


def _edits(count: int, per_s: float, masks: MaskRatios, steps: int) -> list[SimulatedEdit]:
    """The same ones for the same masks. per_s: 0 has all come at once."""
    chance = random.Random(f"{masks.name} {count}")
    shares, templates = masks.draw(chance), TemplatePopularity().draw(chance)
    at_s = itertools.accumulate(chance.expovariate(per_s) if per_s else 0.0 for _ in range(count))
    return [
        SimulatedEdit(number=number, at_s=at, computed_share=min(1.0, share + _MARGIN), template=place, steps=steps)
        for number, (at, share, place) in enumerate(zip(at_s, shares, templates, strict=False))
    ]


def main() -> None:
    """Prints the table and the line of JSON."""
    options = _options()
    if options.only_decisions:
        decisions = _decisions(options.looks)
        report("scheduling", _of_decisions(decisions), decisions)
        return
    print("measures what turns cost", flush=True)
    turns = measured(threads=options.threads, rounds=options.rounds)
    compared = _compare_all(FleetCosts(turns=turns), options)
    values = {**_values(turns, compared), **_decisions(options.looks)}
    report("scheduling", [*map(_row, compared), *_summary(values)], values)


def _decisions(looks: int) -> dict[str, float]:
    times_s = decision_times_s(looks=looks)
    return {"decision_p99_ms": 1e3 * percentile(times_s, 0.99), "decision_p50_ms": 1e3 * percentile(times_s, 0.5)}


def _values(turns: TurnCosts, compared: Iterable[Compared]) -> dict[str, float]:
    all_of_them = list(compared)
    return {
        "p95_reduction": statistics.median(each.reduction for each in all_of_them),
        "vs_tokens": statistics.median(each.vs_tokens for each in all_of_them),
        "least_p95_reduction": min(each.reduction for each in all_of_them),
        "least_vs_tokens": min(each.vs_tokens for each in all_of_them),
        "costs_r2": turns.r2,
        "turn_s": turns.turn_s,
        "row_s": turns.row_s,
        "fixed_share": turns.fixed_share,
    }


def _row(each: Compared) -> tuple[str, str, str]:
    return (
        f"{each.workers} workers, {each.masks} masks, {each.per_s:.2f} edits/s: p95 by requests, tokens, policy",
        f"{each.requests_s:.1f} s, {each.tokens_s:.1f} s, {each.policy_s:.1f} s",
        f"-{100 * each.reduction:.0f} %, -{100 * each.vs_tokens:.0f} %",
    )


def _summary(values: dict[str, float]) -> list[tuple[str, str, str]]:
    return [
        ("median over all (p95_reduction)", f"{values['p95_reduction']:.2f}", f"at least {WANTED_REDUCTION:g}"),
        ("least of all (least_p95_reduction)", f"{values['least_p95_reduction']:.2f}", ""),
        ("the same against tokens (vs_tokens)", f"{values['vs_tokens']:.2f}", "above 0"),
        *_of_decisions(values),
        ("fit of the costs, R^2 over turns held out", f"{values['costs_r2']:.3f}", f"at least {WANTED_R2:g}"),
    ]


def _of_decisions(values: dict[str, float]) -> list[tuple[str, str, str]]:
    return [
        ("a decision, 64 workers and 1,000 queued, p50", f"{values['decision_p50_ms']:.2f} ms", ""),
        ("    p99 (decision_p99_ms)", f"{values['decision_p99_ms']:.2f} ms", f"at most {WANTED_DECISION_MS:g} ms"),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-scheduling", description=__doc__)
    parser.add_argument("--edits-per-worker", type=int, default=100, help="of each run (default: 100)")
    parser.add_argument("--steps", type=int, default=20, help="of each edit (default: 20)")
    parser.add_argument("--looks", type=int, default=2000, help="of the scheduler that are measured (default: 2000)")
    parser.add_argument("--rounds", type=int, default=2, help="of the turns that costs are fitted to (default: 2)")
    parser.add_argument("--threads", type=int, default=2, help="of the engine that is measured (default: 2)")
    parser.add_argument("--only-decisions", action="store_true", help="leave the simulated fleets out")
    return parser.parse_args()


if __name__ == "__main__":
    begin_with_exclusive_cores()
    main()
