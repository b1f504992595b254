"""One LoRA in and out again: Diffusers' load, fuse, unfuse and unload against the suite's fetch, patch and restore.

On SDXL's full topology at a quarter of its width, and on the embedded model; each side in a process of its own that
takes turns with the other; medians. Peak memory is what each rises by above the loaded model.
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

# SDXL's levels, depths and layers; its UNet has 320, 640 and 1280 channels.
SDXL = BenchShape(block_out_channels=(80, 160, 320), transformer_layers=(2, 10), text_width=256)
THREADS = 2
WANTED = 10.0


@dataclass(slots=True, kw_only=True)
class Swaps:
    """Of one side, one for each round."""

    seconds: list[float] = field(default_factory=list)
    peak_mib: list[float] = field(default_factory=list)


def measure(model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Swaps]:
    """Swaps a new LoRA of the same kind in every round."""
    swaps = {"diffusers": Swaps(), "suite": Swaps()}
    folder.mkdir()
    with Side("diffusers", model, THREADS) as theirs, Side("suite", model, THREADS) as ours:
        for seed in range(options.rounds + 1):
            lora = random_lora(model, folder, seed=seed, rank=options.rank)
            for name, side in (("diffusers", theirs), ("suite", ours)):
                answer = side.swap(lora)
                if seed:  # the first pays for what is made once
                    swaps[name].seconds.append(answer["seconds"])
                    swaps[name].peak_mib.append(answer["peak_mib"])
    return swaps


def main() -> None:
    """Prints the table and the line of JSON."""
    parser = argparse.ArgumentParser(prog="make bench-lora-swap", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="swaps on each side (default: 7)")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA, in all attention layers (default: 16)")
    options = parser.parse_args()
    rows: list[tuple[str, str, str]] = []
    values: dict[str, float] = {}
    with scratch() as folder:
        write_bench_model(folder / "model", SDXL)
        for name, model in (("sdxl", folder / "model"), ("miniature", WEIGHTS)):
            swaps = measure(model, folder / name, options)
            for side, each in swaps.items():
                said = f"{1000 * median(each.seconds):.1f} ms, {median(each.peak_mib):.0f} MiB"
                rows.append((f"{name}: {side}", said, ""))
                values[f"peak_mib_{side}_{name}"] = median(each.peak_mib)
            ratio = median(swaps["diffusers"].seconds) / median(swaps["suite"].seconds)
            rows.append((f"{name}: times faster", f"{ratio:.1f}", f"at least {WANTED:g}"))
            values[f"speedup_{name}"] = ratio
    report("lora-swap", rows, values)


if __name__ == "__main__":
    main()
