"""Eight requests with eight different LoRAs at once, in images per second: the engine against Diffusers, which swaps
one by one, and against itself without LoRAs; on the embedded model and on a wide bench model.

Each side is a process of its own that takes turns with the others; medians. The engine gets LoRAs from files.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bottega.miniature import WEIGHTS
from load.bench.bench_model import BenchShape, write_bench_model
from load.bench.lora_files import random_lora
from load.bench.lora_sides import Side
from load.bench.report import report
from load.bench.scratch import scratch

WIDE = BenchShape(block_out_channels=(128, 256, 512), transformer_layers=(1, 2))
REQUESTS = 8
THREADS = 2
WANTED_MINIATURE, WANTED_BENCH = 0.7, 0.85


@dataclass(slots=True, kw_only=True)
class Measured:
    """Seconds for all requests, one for each round."""

    swapping: list[float] = field(default_factory=list)
    mixed: list[float] = field(default_factory=list)
    none: list[float] = field(default_factory=list)

    @property
    def vs_none(self) -> float:
        """The share of images per second that is left with LoRAs."""
        return median(self.none) / median(self.mixed)

    @property
    def vs_swapping(self) -> float:
        """How many times as many images per second as Diffusers."""
        return median(self.swapping) / median(self.mixed)


def measure(model: Path, folder: Path, *, steps: int, size: int, options: argparse.Namespace) -> Measured:
    """Draws in turns, the first round not counted."""
    measured = Measured()
    folder.mkdir()
    loras = [random_lora(model, folder, seed=seed, rank=options.rank) for seed in range(REQUESTS)]
    with Side("diffusers", model, THREADS) as theirs, Side("suite", model, THREADS) as ours:
        for number in range(options.rounds + 1):
            swapping = theirs.draw(loras, steps=steps, size=size)
            mixed = ours.draw(loras, steps=steps, size=size)
            none = ours.draw([None] * REQUESTS, steps=steps, size=size)
            if number:
                measured.swapping.append(swapping)
                measured.mixed.append(mixed)
                measured.none.append(none)
    return measured


def main() -> None:
    """Prints the table and the line of JSON."""
    parser = argparse.ArgumentParser(prog="make bench-lora-mix", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of all requests, on each side (default: 5)")
    parser.add_argument("--steps", type=int, default=20, help="of the embedded model's requests (default: 20)")
    parser.add_argument("--bench-steps", type=int, default=4, help="of the wide bench model's (default: 4)")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRAs, in all attention layers (default: 16)")
    options = parser.parse_args()
    with scratch() as folder:
        write_bench_model(folder / "model", WIDE)
        small = measure(WEIGHTS, folder / "small", steps=options.steps, size=64, options=options)
        size = WIDE.sample_size * WIDE.latent_scale
        wide = measure(folder / "model", folder / "wide", steps=options.bench_steps, size=size, options=options)
    rows = [
        ("miniature: against Diffusers swapping", f"{small.vs_swapping:.2f}", ""),
        ("miniature: against no LoRAs", f"{small.vs_none:.2f}", f"at least {WANTED_MINIATURE:g}"),
        ("wide model: against Diffusers swapping", f"{wide.vs_swapping:.2f}", ""),
        ("wide model: against no LoRAs", f"{wide.vs_none:.2f}", f"at least {WANTED_BENCH:g}"),
    ]
    values = {
        "vs_swapping": small.vs_swapping,
        "vs_none": small.vs_none,
        "vs_swapping_bench": wide.vs_swapping,
        "vs_none_bench": wide.vs_none,
    }
    report("lora-mix", rows, values)


if __name__ == "__main__":
    main()
