"""What does a pair of one-core workers gain on a guided request, against one of them, on the bench model?

A step of one row, a step of two rows and a step of two rows on two workers are measured in every round, in one run. The
ideal is the time of two rows over that of one: with it the pair would hide all of the second row. What two cores that
compute at once take from each other is measured too, by steps of one row on both. Both workers live through the whole
run, each on a core of its own with one thread; the pair's pictures are compared with the one worker's.

A run takes 2 minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from load.bench.bench_model import DEFAULT, write_bench_model
from load.bench.framework import Bench, Option, Sheet, by_turns
from tests.support.worker_pair import Drawn, WorkerPair

WANTED = 0.93
BENCH = Bench(
    __file__,
    __doc__,
    Option("--rounds", 16, "each draws four pictures", smallest=1),
    Option("--steps", 10, "of a picture", smallest=3),
)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> int:
    """Draw with one and with both; return 2 where the machine has not two cores."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("bench-latent-parallel needs two cores, one for each worker", file=sys.stderr)
        return 2
    model, steps = folder / "bench", options.steps
    write_bench_model(model, DEFAULT.for_run(smallest=options.smallest))
    with WorkerPair(folder, {"model": str(model), "dtype": "float32", "threads": 1}, cores=cores) as pair:

        def asked(seed: int, **more: Any) -> dict[str, Any]:
            side = DEFAULT.side
            common = {"model": "bench", "num_inference_steps": steps, "width": side, "height": side, "seed": seed}
            return {**common, **more}

        def beside(seed: int) -> Drawn:
            """Draw by one of them, while the other one draws another."""
            other = pair.begin("b", **asked(seed, guidance_scale=1.0))
            drawn = pair.draw("a", **asked(seed, guidance_scale=1.0))
            other.result()
            return drawn

        draws: dict[str, Callable[[int], Drawn]] = {
            "one_row": lambda seed: pair.draw("a", **asked(seed, guidance_scale=1.0)),
            "two_rows": lambda seed: pair.alone("a", **asked(seed)),
            "paired": lambda seed: pair.draw("a", **asked(seed)),
            "beside": beside,
        }
        found = by_turns(draws, options.rounds)
    # Of one turn: the network, the sampler, and what lies between.
    step_s = {
        name: [(each.seconds("denoise") + each.seconds("batch")) / steps for each in drawn]
        for name, drawn in found.items()
    }
    step_s["peer_wait"] = [each.provenance.pair.waited_s / steps for each in found["paired"]]
    labels = {
        "one_row": "step of one row, ms",
        "beside": "the same while the other core has one, ms",
        "two_rows": "step of two rows on one worker, ms",
        "paired": "step of two rows on two workers, ms",
        "peer_wait": "of that waiting for the other one, ms",
    }
    for name, label in labels.items():
        sheet.values[f"{name}_s"] = median(step_s[name])
        sheet.row(label, f"{median(step_s[name]) * 1e3:.1f}")

    def ratio(over: str, under: str) -> float:
        return float(median(one / other for one, other in zip(step_s[over], step_s[under], strict=True)))

    sheet.figure("ideal speedup", ratio("two_rows", "one_row"), "{:.3f}", key="ideal")
    sheet.figure("speedup", ratio("two_rows", "paired"), "{:.3f}", key="speedup")
    achieved, key = ratio("one_row", "paired"), "achieved_over_ideal"
    sheet.figure("achieved over ideal", achieved, "{:.3f}", key=key, bar=f"at least {WANTED}")
    shared = min(each.lent_steps / steps for each in found["paired"])
    sheet.figure("steps that were shared", shared, "{:.0%}", key="shared_steps", bar="100%")
    both = zip(found["paired"], found["two_rows"], strict=True)
    off = max(int(np.abs(one.pixels.astype(int) - other.pixels.astype(int)).max()) for one, other in both)
    sheet.figure("worst pixel value off by", off, "{}", key="off", bar="at most 1")
    return 0


if __name__ == "__main__":
    sys.exit(BENCH.command())
