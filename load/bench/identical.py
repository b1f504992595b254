"""What an identical request takes: one that asks again, seed included, for a picture that is stored.

One client through the suite, by the SDK, after the picture was drawn once; for comparison, requests of other seeds,
which are drawn. Both are answered by the same gateway, which makes every job durable before it says so.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median

from bottega.client import Client
from load.bench.report import percentile, report
from load.bench.scratch import scratch
from load.bench.suite import running_gateway

PROMPT = "a big red star on the left on a blue background"
STEPS = 20
DRAWN = 10


def main() -> None:
    """Draws, asks again, and reports."""
    options = _options()
    with (
        scratch() as folder,
        running_gateway("miniature", options.threads, folder / "suite", identical_results=True) as gateway,
        Client(gateway.address) as client,
    ):
        drawn_s = [_ask(client, seed, drawn=True) for seed in range(DRAWN)]
        again_s = [_ask(client, number % DRAWN, drawn=False) for number in range(options.requests)]
    values = {
        "identical_ms": median(again_s) * 1e3,
        "identical_p99_ms": percentile(again_s, 0.99) * 1e3,
        "drawn_ms": median(drawn_s) * 1e3,
        "requests": options.requests,
    }
    rows = [
        ("an identical request (identical_ms)", f"{values['identical_ms']:.1f} ms", "at most 15 ms"),
        ("  the slowest hundredth (identical_p99_ms)", f"{values['identical_p99_ms']:.1f} ms", ""),
        (f"one that is drawn, in {STEPS} steps (drawn_ms)", f"{values['drawn_ms']:.0f} ms", ""),
    ]
    report("identical", rows, values)


def _ask(client: Client, seed: int, *, drawn: bool) -> float:
    """Seconds of a request."""
    began = time.perf_counter()
    picture = client.generate(PROMPT, seed=seed, num_inference_steps=STEPS)
    took_s = time.perf_counter() - began
    assert bool(picture.provenance.identical_job) != drawn
    return took_s


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500, help="identical ones")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the worker's torch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
