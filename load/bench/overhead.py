"""What the suite costs one client: requests through gateway and worker against the bare Diffusers pipeline in process.

Both are warm, have the same threads and wait policy, and take turns; medians are compared. With the bench
model, steps are so long that compute dominates (ratio); with the embedded one, what is added shows (added_ms).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bottega.client import Client, Picture
from bottega.miniature import WEIGHTS
from load.bench.bench_model import write_bench_model
from load.bench.reference import Batch, Reference
from load.bench.report import report
from load.bench.scratch import scratch
from load.bench.suite import running

PROMPT = "a big red star on the left on a blue background"
STEPS = 20
GUIDANCE_SCALE = 5.0
WARM_UPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Seconds of each request, drawn alternately by the reference and by the suite."""

    reference_s: Sequence[float]
    suite_s: Sequence[float]
    pictures: Sequence[Picture]

    def stage_ms(self, stage: str) -> float:
        """Median milliseconds that a stage of the suite took, by the provenance."""
        return median(_stage_s(picture, stage) for picture in self.pictures) * 1e3


def compare(model: Path, served_as: str, options: argparse.Namespace, folder: Path) -> Comparison:
    """Draws `options.requests` pictures on each side, in turns.

    served_as: what a worker's configuration calls the model.
    """
    reference_s, suite_s, pictures = [], [], []
    with (
        Reference(model, options.threads) as reference,
        running(served_as, options.threads, folder, tls=options.tls) as address,
        Client(address) as client,
    ):
        for seed in range(WARM_UPS + options.requests):
            plain = reference.draw(Batch(prompts=(PROMPT,), seeds=(seed,), steps=STEPS, guidance_scale=GUIDANCE_SCALE))
            picture, seconds = _draw(client, seed)
            if seed >= WARM_UPS:
                reference_s.append(plain)
                suite_s.append(seconds)
                pictures.append(picture)
    return Comparison(reference_s=reference_s, suite_s=suite_s, pictures=pictures)


def main() -> None:
    """Runs both comparisons and reports."""
    options = _options()
    with scratch() as folder:
        bench_model = folder / "bench-model"
        write_bench_model(bench_model)
        large = compare(bench_model, str(bench_model), options, folder / "large")
        small = compare(WEIGHTS, "miniature", options, folder / "small")
    _report(large, small, options)


def _report(large: Comparison, small: Comparison, options: argparse.Namespace) -> None:
    ratio = median(large.suite_s) / median(large.reference_s)
    added_ms = (median(small.suite_s) - median(small.reference_s)) * 1e3
    values = {
        "ratio": ratio,
        "added_ms": added_ms,
        "route_ms": small.stage_ms("route"),
        "batch_ms_per_step": small.stage_ms("batch") / STEPS,
        "handoff_ms": small.stage_ms("handoff"),
        "reference_step_ms": median(large.reference_s) / STEPS * 1e3,
        "reference_s": median(large.reference_s),
        "miniature_reference_ms": median(small.reference_s) * 1e3,
        "requests": options.requests,
        "threads": options.threads,
    }
    rows = [
        ("a step of the bench model, in the reference", f"{values['reference_step_ms']:.0f} ms", "100 to 150 ms"),
        ("a request: suite over reference (ratio)", f"{ratio:.3f}", "at most 1.05"),
        ("a request of the miniature, in the reference", f"{values['miniature_reference_ms']:.0f} ms", ""),
        ("added by the suite (added_ms)", f"{added_ms:.1f} ms", "at most 60 ms"),
        ("  of it routing (route_ms)", f"{values['route_ms']:.2f} ms", "at most 0.6 ms"),
        ("  of it batching, a step (batch_ms_per_step)", f"{values['batch_ms_per_step']:.2f} ms", "at most 1.2 ms"),
        ("  of it hand-off to encoding (handoff_ms)", f"{values['handoff_ms']:.2f} ms", "at most 2.4 ms"),
    ]
    report("overhead", rows, values)


def _draw(client: Client, seed: int) -> tuple[Picture, float]:
    began = time.perf_counter()
    picture = client.generate(PROMPT, seed=seed, num_inference_steps=STEPS, guidance_scale=GUIDANCE_SCALE)
    return picture, time.perf_counter() - began


def _stage_s(picture: Picture, stage: str) -> float:
    times = {spent.stage: spent.seconds for spent in picture.provenance.times}
    return times[stage]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=15, help="requests on each side, for each model")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch, on each side")
    parser.add_argument("--tls", action="store_true", help="services and caller know each other by certificates")
    return parser.parse_args()


if __name__ == "__main__":
    main()
