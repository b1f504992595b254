"""What does an identical request take: one that asks again, seed included, for a picture that is stored?

One client through the suite, by the SDK, after the picture was drawn once; for comparison, requests of other seeds,
which are drawn. Both are answered by the same gateway, which makes every job durable before it says so.

A run takes 1 minute on two cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

from bottega.client import Client
from load.bench.framework import CORES, PROMPT, Bench, Option, Sheet, percentile, timed
from load.bench.suites import plain_suite

STEPS = 20
DRAWN = 10
BENCH = Bench(
    __file__,
    __doc__,
    Option("--requests", 500, "identical ones", smallest=5),
    Option("--threads", CORES, "of the worker's torch"),
)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Draw, and ask again."""
    with (
        plain_suite("miniature", options.threads, folder / "suite", identical_results=True) as gateway,
        Client(gateway.address) as client,
    ):

        def asked_ms(seed: int, *, drawn: bool) -> float:
            picture, took_s = timed(lambda: client.generate(PROMPT, seed=seed, num_inference_steps=STEPS))
            assert bool(picture.provenance.identical_job) != drawn
            return took_s * 1e3

        drawn_ms = [asked_ms(seed, drawn=True) for seed in range(DRAWN)]
        again_ms = [asked_ms(number % DRAWN, drawn=False) for number in range(options.requests)]
    sheet.figure("an identical request", median(again_ms), "{:.1f} ms", key="identical_ms", bar="at most 15 ms")
    sheet.figure("  the slowest hundredth", percentile(again_ms, 0.99), "{:.1f} ms", key="identical_p99_ms")
    sheet.figure(f"one that is drawn, in {STEPS} steps", median(drawn_ms), "{:.0f} ms", key="drawn_ms")
    sheet.values["requests"] = options.requests


if __name__ == "__main__":
    sys.exit(BENCH.command())
