"""Bounded asynchronous loading: what a slow store adds to a request with one LoRA and with two, in time and quality.

The store is throttled so that loading takes as many steps as a LoRA may be late. Latency on a model whose steps are
long, against the same request without LoRAs, and against Diffusers, which loads first; quality on the embedded model,
against pictures that have their LoRAs from the first step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bottega.client import Lora, Picture
from bottega.client.suite.plan import free_ports
from load.bench.addon_reference import GUIDANCE_SCALE, PROMPT, AddonReference, Ask
from load.bench.bal_quality import Quality, compare
from load.bench.bench_model import DEFAULT, write_bench_model
from load.bench.lora_files import LoraFiles, random_lora
from load.bench.lora_suite import Cast, LoraSuite, cold_cast, suite
from load.bench.report import report
from load.bench.scratch import scratch
from load.bench.throttle import Throttle

BASE = "bench"
THREADS = 2
# As large as it takes for the header to be as small a part of the file as it is of a real LoRA.
RANK = 64
COUNTS = {0: "none", 1: "one", 2: "two"}
WANTED_RATIO = 1.05
WANTED_SSIM = {"one": 0.83, "two": 0.82}
WANTED_CLIP_DROP = 0.1
# Of the steps, how late LoRAs may be: what the gateway allows one without a profile, and Katz any.
BOUND_SHARE = 0.2


@dataclass(slots=True, kw_only=True)
class Timed:
    """Requests with so many LoRAs, an entry for each round. from_steps: at which they went in; waits_s: for them."""

    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    from_steps: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One suite whose store is behind the throttle. sizes_bytes: of the LoRAs there. bound: the step at which they are
    in at the latest."""

    running: LoraSuite
    throttle: Throttle
    loras: tuple[LoraFiles, ...]
    sizes_bytes: tuple[int, ...]
    steps: int
    bound: int

    def draw(self, count: int, seed: int) -> tuple[Picture, float]:
        """A picture with so many LoRAs, and its seconds."""
        began_s = time.perf_counter()
        picture = self.running.client.generate(
            PROMPT,
            seed=seed,
            num_inference_steps=self.steps,
            guidance_scale=GUIDANCE_SCALE,
            lora=[Lora(f"lora{number}", max_step=self.bound) for number in range(count)],
            bounded_lora_loading=True,
        )
        return picture, time.perf_counter() - began_s

    def slow_down(self, count: int, step_s: float) -> float:
        """Makes loading of so many LoRAs take as long as the steps that they may miss; returns those seconds."""
        seconds = self.bound * step_s
        size_bytes = sum(self.sizes_bytes[:count])
        self.throttle.bytes_per_s = size_bytes / seconds if size_bytes else 1e9
        return seconds if count else 0.0


def latency(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Timed], int]:
    """Suite and Diffusers in turns; and the bound."""
    write_bench_model(folder / "model", DEFAULT)
    (folder / "loras").mkdir()
    loras = tuple(random_lora(folder / "model", folder / "loras", seed=seed, rank=RANK) for seed in range(2))
    bound = int(options.steps * BOUND_SHARE)
    with Throttle() as throttle, suite(_cast(folder, throttle)) as running:
        added = [running.client.add_lora(f"lora{number}", lora.theirs) for number, lora in enumerate(loras)]
        bench = Bench(
            running=running,
            throttle=throttle,
            loras=loras,
            sizes_bytes=tuple(lora.size_bytes for lora in added),
            steps=options.steps,
            bound=bound,
        )
        with AddonReference(folder / "model", THREADS) as reference:
            return _rounds(bench, reference, options.rounds), bound


def _rounds(bench: Bench, reference: AddonReference, rounds: int) -> dict[str, Timed]:
    timed = {name: Timed() for name in COUNTS.values()}
    step_s = 0.0
    for seed in range(rounds + 1):
        for count, name in COUNTS.items():
            fetch_s = bench.slow_down(count, step_s) if step_s else 0.0
            picture, seconds = bench.draw(count, seed)
            files = [str(lora.theirs) for lora in bench.loras[:count]]
            answer = reference.draw(Ask(seed=seed, steps=bench.steps, loras=files, fetch_s=fetch_s))
            if count == 0:
                step_s = _step_s(picture)
            if seed:  # the first round pays for what is made once
                timed[name].ours_s.append(seconds)
                timed[name].theirs_s.append(answer.seconds)
                timed[name].from_steps += [use.from_step for use in picture.provenance.loras[:1]]
                timed[name].waits_s += [use.wait_s for use in picture.provenance.loras[:1]]
    return timed


def _step_s(picture: Picture) -> float:
    spent = {each.stage: each.seconds for each in picture.provenance.times}
    return spent["denoise"] / picture.provenance.parameters.num_inference_steps


def _cast(folder: Path, throttle: Throttle) -> Cast:
    throttle.target = free_ports(1)[0]
    links = {
        "socket": None,
        "listen": f"127.0.0.1:{throttle.target}",
        "advertised": f"127.0.0.1:{throttle.port}",
    }
    return cold_cast(folder / "suite", folder / "model", base=BASE, threads=THREADS, links=links)


def _report(timed: dict[str, Timed], bound: int, quality: dict[str, Quality], steps: int) -> None:
    rows: list[tuple[str, str, str]] = []
    values: dict[str, float] = {"bound": bound}
    for name, each in timed.items():
        rows.append((f"{name}: suite, Diffusers", f"{median(each.ours_s):.2f} s, {median(each.theirs_s):.2f} s", ""))
        if each.from_steps:
            ratio = median(each.ours_s) / median(timed["none"].ours_s)
            theirs = median(each.theirs_s) / median(timed["none"].theirs_s)
            said = f"{median(each.from_steps):g} of {steps}, {1000 * median(each.waits_s):.0f} ms"
            rows += [
                ("    went in at step, waited for", said, f"step {bound} at the latest"),
                (f"    over none, suite (ratio_{name})", f"{ratio:.3f}", f"at most {WANTED_RATIO:g}"),
                ("    over none, Diffusers", f"{theirs:.3f}", ""),
            ]
            values |= {f"ratio_{name}": ratio, f"diffusers_ratio_{name}": theirs}
            values |= {f"from_step_{name}": median(each.from_steps), f"wait_s_{name}": median(each.waits_s)}
    for name, measured in quality.items():
        its_rows, its_values = measured.reported(name, bound, WANTED_SSIM[name], WANTED_CLIP_DROP)
        rows += its_rows
        values |= its_values
    report("bal", rows, values)


def main() -> None:
    """Prints the table and the line of JSON."""
    parser = argparse.ArgumentParser(prog="make bench-bal", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of all requests, on each side (default: 5)")
    parser.add_argument("--steps", type=int, default=30, help="of a picture (default: 30)")
    parser.add_argument("--prompts", type=int, default=50, help="whose pictures are compared; 0 is none (default: 50)")
    parser.add_argument("--late", type=int, nargs="*", default=(3, 10, 15), help="further steps K to compare at")
    parser.add_argument(
        "--loras", type=Path, nargs=2, help="files or folders for the embedded model (default: its own)"
    )
    options = parser.parse_args()
    with scratch() as folder:
        timed, bound = latency(folder, options)
        lates: Sequence[int] = sorted({bound, *options.late})
        quality = compare(folder / "quality", options, lates) if options.prompts else {}
    _report(timed, bound, quality, options.steps)


if __name__ == "__main__":
    main()
