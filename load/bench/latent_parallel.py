"""What a pair of one-core workers gains on a guided request, against one of them, on the bench model.

A step of one row, a step of two rows and a step of two rows on two workers are measured in every round, in one run. The
ideal is the time of two rows over that of one: with it the pair would hide all of the second row. What two cores that
compute at once take from each other is measured too, by steps of one row on both. Both workers live through the whole
run, each on a core of its own with one thread; the pair's pictures are compared with the one worker's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from load.bench.bench_model import write_bench_model
from load.bench.report import report
from load.bench.scratch import scratch
from tests.support.worker_pair import Drawn, WorkerPair

# The bench model's own size.
SIZE = 256
WANTED = 0.93


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of a step: of one row, of two, of two on two workers, and of one while the other worker has one, too.

    peer_wait_s: of the paired one, for the other worker's row when its own was done. lent: share of the pair's steps
    that were shared. off: worst pixel value.
    """

    one_row_s: float
    two_rows_s: float
    paired_s: float
    beside_s: float
    peer_wait_s: float
    lent: float
    off: int


def main() -> int:
    """Runs the bench; 2 where the machine has not two cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=16, help="each draws four pictures")
    parser.add_argument("--steps", type=int, default=10, help="of a picture")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("bench-latent-parallel needs two cores, one for each worker", file=sys.stderr)
        return 2
    with scratch() as folder:
        model = folder / "bench"
        write_bench_model(model)
        engine = {"model": str(model), "dtype": "float32", "threads": 1}
        with WorkerPair(folder, engine, cores=cores) as pair:
            # The first is for whatever is made once. By turns forwards and backwards: the machine's speed drifts.
            rounds = [_round(pair, number, options.steps) for number in range(options.rounds + 1)][1:]
    _report(rounds)
    return 0


def _round(pair: WorkerPair, number: int, steps: int) -> Round:
    said: dict[str, Any] = {
        "model": "bench",
        "num_inference_steps": steps,
        "width": SIZE,
        "height": SIZE,
        "seed": number,
    }
    draws: Mapping[str, Callable[[], Drawn]] = {
        "one": lambda: pair.draw("a", **said, guidance_scale=1.0),
        "two": lambda: pair.alone("a", **said),
        "paired": lambda: pair.draw("a", **said),
        "beside": lambda: _beside(pair, **said, guidance_scale=1.0),
    }
    drawn = {name: draws[name]() for name in list(draws)[:: 1 if number % 2 else -1]}
    pixels = {name: each.pixels.astype(int) for name, each in drawn.items()}
    return Round(
        one_row_s=_step_s(drawn["one"], steps),
        two_rows_s=_step_s(drawn["two"], steps),
        paired_s=_step_s(drawn["paired"], steps),
        beside_s=_step_s(drawn["beside"], steps),
        peer_wait_s=drawn["paired"].provenance.pair.waited_s / steps,
        lent=drawn["paired"].lent_steps / steps,
        off=int(np.abs(pixels["paired"] - pixels["two"]).max()),
    )


def _beside(pair: WorkerPair, **said: Any) -> Drawn:
    """A picture by one of them, while the other one draws another."""
    other = pair.begin("b", **said)
    drawn = pair.draw("a", **said)
    other.result()
    return drawn


def _step_s(drawn: Drawn, steps: int) -> float:
    """Seconds of one turn: the network, the sampler, and what lies between."""
    return (drawn.seconds("denoise") + drawn.seconds("batch")) / steps


def _report(rounds: Sequence[Round]) -> None:
    def middle(value: Callable[[Round], float]) -> float:
        return median(map(value, rounds))

    times = {
        "one_row_s": middle(lambda each: each.one_row_s),
        "two_rows_s": middle(lambda each: each.two_rows_s),
        "paired_s": middle(lambda each: each.paired_s),
        "beside_s": middle(lambda each: each.beside_s),
        "peer_wait_s": middle(lambda each: each.peer_wait_s),
    }
    ideal = middle(lambda each: each.two_rows_s / each.one_row_s)
    speedup = middle(lambda each: each.two_rows_s / each.paired_s)
    achieved = middle(lambda each: each.one_row_s / each.paired_s)
    shared, off = min(each.lent for each in rounds), max(each.off for each in rounds)
    table = [
        ("step of one row, ms", f"{times['one_row_s'] * 1e3:.1f}", ""),
        ("the same while the other core has one, ms", f"{times['beside_s'] * 1e3:.1f}", ""),
        ("step of two rows on one worker, ms", f"{times['two_rows_s'] * 1e3:.1f}", ""),
        ("step of two rows on two workers, ms", f"{times['paired_s'] * 1e3:.1f}", ""),
        ("of that waiting for the other one, ms", f"{times['peer_wait_s'] * 1e3:.1f}", ""),
        ("ideal speedup", f"{ideal:.3f}", ""),
        ("speedup", f"{speedup:.3f}", ""),
        ("achieved over ideal", f"{achieved:.3f}", f"at least {WANTED}"),
        ("steps that were shared", f"{shared:.0%}", "100%"),
        ("worst pixel value off by", f"{off}", "at most 1"),
    ]
    ratios = {"achieved_over_ideal": achieved, "speedup": speedup, "ideal": ideal}
    report("latent-parallel", table, {**ratios, **times, "shared_steps": shared, "off": off})


if __name__ == "__main__":
    sys.exit(main())
