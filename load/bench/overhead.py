"""What does the suite cost one client?

Requests through gateway and worker against the bare Diffusers pipeline in a process of its own. Both are warm, have the
same threads and wait policy, and take turns; medians are compared. With the bench model, steps are so long that compute
dominates (ratio); with the embedded one, what is added shows (added_ms).

A run takes 3 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bottega.client import Client, Picture
from bottega.miniature import WEIGHTS
from load.bench.bench_model import DEFAULT, write_bench_model
from load.bench.framework import CORES, GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet, by_turns, timed
from load.bench.side_process import Side
from load.bench.stock import stock
from load.bench.suites import plain_suite, stage_s

STEPS = 20
WARM_UPS = 2
BENCH = Bench(
    __file__,
    __doc__,
    Option("--requests", 15, "on each side, for each model", smallest=1),
    Option("--threads", CORES, "of torch, on each side"),
    Option("--tls", False, "services and caller know each other by certificates"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Median seconds of a request, and the suite's pictures."""

    reference_s: float
    suite_s: float
    pictures: list[Picture]

    def stage_ms(self, stage: str) -> float:
        """Return the median milliseconds that a stage of the suite took, by the provenance."""
        return median(stage_s(picture, stage) for picture in self.pictures) * 1e3


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Compare with both models."""
    model = folder / "bench-model"
    write_bench_model(model, DEFAULT.for_run(smallest=options.smallest))
    large = _compare(model, str(model), folder / "large", options)
    small = _compare(WEIGHTS, "miniature", folder / "small", options)
    step_ms, added_ms = large.reference_s / STEPS * 1e3, (small.suite_s - small.reference_s) * 1e3
    what, bar = "a step of the bench model, in the reference", "100 to 150 ms"
    sheet.figure(what, step_ms, "{:.0f} ms", key="reference_step_ms", bar=bar)
    ratio, bar = large.suite_s / large.reference_s, "at most 1.05"
    sheet.figure("a request: suite over reference", ratio, "{:.3f}", key="ratio", bar=bar)
    what, key = "a request of the miniature, in the reference", "miniature_reference_ms"
    sheet.figure(what, small.reference_s * 1e3, "{:.0f} ms", key=key)
    sheet.figure("added by the suite", added_ms, "{:.1f} ms", key="added_ms", bar="at most 60 ms")
    for what, key, value, bar in (
        ("routing", "route_ms", small.stage_ms("route"), "at most 0.6 ms"),
        ("batching, a step", "batch_ms_per_step", small.stage_ms("batch") / STEPS, "at most 1.2 ms"),
        ("hand-off to encoding", "handoff_ms", small.stage_ms("handoff"), "at most 2.4 ms"),
    ):
        sheet.figure(f"  of it {what}", value, "{:.2f} ms", key=key, bar=bar)
    sheet.values |= {"reference_s": large.reference_s, "requests": options.requests, "threads": options.threads}


def _compare(model: Path, served_as: str, folder: Path, options: argparse.Namespace) -> Comparison:
    """Draw on each side, in turns.

    Args:
        served_as: The model in a worker's configuration.
    """
    with (
        Side(stock, threads=options.threads, model=model) as reference,
        plain_suite(served_as, options.threads, folder, tls=options.tls) as gateway,
        Client(gateway.address) as client,
    ):
        pictures: list[Picture] = []

        def ours(seed: int) -> float:
            picture, seconds = timed(
                lambda: client.generate(PROMPT, seed=seed, num_inference_steps=STEPS, guidance_scale=GUIDANCE_SCALE)
            )
            pictures.append(picture)
            return seconds

        def theirs(seed: int) -> float:
            return reference.ask(prompts=[PROMPT], seeds=[seed], steps=STEPS)["seconds"]

        found = by_turns({"theirs": theirs, "ours": ours}, options.requests, warm_ups=WARM_UPS)
    return Comparison(reference_s=median(found["theirs"]), suite_s=median(found["ours"]), pictures=pictures[WARM_UPS:])


if __name__ == "__main__":
    sys.exit(BENCH.command())
