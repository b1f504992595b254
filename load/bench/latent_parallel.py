"""What a pair of one-core workers gains on a guided request, against one of them, on the bench model.

A step of one row, a step of two rows and a step of two rows on two workers are measured by turns, in one run. The ideal
is the time of two rows over that of one: with it the pair would hide all of the second row. Both workers live through
the whole run, each on a core of its own with one thread; the pair's pictures are compared with the one worker's.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from bottega.diffusion.bench_model import write_bench_model
from load.bench.report import report
from tests.worker_pair import Drawn, WorkerPair

# The bench model's own size.
SIZE = 256
WANTED = 0.93


@dataclass(slots=True, kw_only=True)
class Measured:
    """Seconds of a step, one for each round. lent: share of the pair's steps that were lent. off: worst pixel value."""

    one_row: list[float] = field(default_factory=list)
    two_rows: list[float] = field(default_factory=list)
    paired: list[float] = field(default_factory=list)
    lent: list[float] = field(default_factory=list)
    off: int = 0


def main() -> int:
    """Runs the bench; 2 where the machine has not two cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="each draws three pictures")
    parser.add_argument("--steps", type=int, default=12, help="of a picture")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is stopped
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("bench-latent-parallel needs two cores, one for each worker", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="bottega-bench-") as folder:
        model = Path(folder) / "bench"
        write_bench_model(model)
        engine = {"model": str(model), "dtype": "float32", "threads": 1}
        with WorkerPair(Path(folder), engine, cores=cores) as pair:
            measured = _measure(pair, rounds=options.rounds, steps=options.steps)
    _report(measured)
    return 0


def _measure(pair: WorkerPair, *, rounds: int, steps: int) -> Measured:
    measured = Measured()
    for number in range(rounds + 1):  # the first is for whatever is made once
        said = {"model": "bench", "num_inference_steps": steps, "width": SIZE, "height": SIZE, "seed": number}
        one = pair.draw("a", **said, guidance_scale=1.0)
        two = pair.alone("a", **said)
        both = pair.draw("a", **said)
        if number == 0:
            continue
        measured.one_row.append(_step_s(one, steps))
        measured.two_rows.append(_step_s(two, steps))
        measured.paired.append(_step_s(both, steps))
        measured.lent.append(both.lent_steps / steps)
        off = int(np.abs(both.pixels.astype(int) - two.pixels.astype(int)).max())
        measured.off = max(measured.off, off)
    return measured


def _step_s(drawn: Drawn, steps: int) -> float:
    """Seconds of one turn: the network, the sampler, and what lies between."""
    return (drawn.seconds("denoise") + drawn.seconds("batch")) / steps


def _report(measured: Measured) -> None:
    one, two, both = (median(each) for each in (measured.one_row, measured.two_rows, measured.paired))
    ideal, speedup = two / one, two / both
    rows = [
        ("step of one row, ms", f"{one * 1e3:.1f}", ""),
        ("step of two rows on one worker, ms", f"{two * 1e3:.1f}", ""),
        ("step of two rows on two workers, ms", f"{both * 1e3:.1f}", ""),
        ("ideal speedup", f"{ideal:.3f}", ""),
        ("speedup", f"{speedup:.3f}", ""),
        ("achieved over ideal", f"{speedup / ideal:.3f}", f"at least {WANTED}"),
        ("steps that were shared", f"{min(measured.lent):.0%}", "100%"),
        ("worst pixel value off by", f"{measured.off}", "at most 1"),
    ]
    values = {"achieved_over_ideal": speedup / ideal, "speedup": speedup, "ideal": ideal}
    times = {"one_row_s": one, "two_rows_s": two, "paired_s": both}
    report("latent-parallel", rows, {**values, **times, "shared_steps": min(measured.lent), "off": measured.off})


if __name__ == "__main__":
    sys.exit(main())
