"""How fast does a LoRA go in and out again?

Diffusers' load, fuse, unfuse and unload against the suite's fetch, patch and restore; on SDXL's full topology at a
quarter of its width, and on the embedded model. Each side is a process of its own; they take turns, and medians are
compared. Peak memory is what each rises by above the loaded model.

A run takes 3 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from bottega.miniature import WEIGHTS
from load.bench.bench_model import BenchShape, write_bench_model
from load.bench.framework import Bench, Option, Sheet, by_turns
from load.bench.lora_files import LoraFiles, random_lora
from load.bench.side_process import Answer, Side
from load.bench.stock import stock_pipeline

# SDXL's levels, depths and layers; its UNet has 320, 640 and 1280 channels.
SDXL = BenchShape(block_out_channels=(80, 160, 320), transformer_layers=(2, 10), text_width=256)
THREADS = 2
WANTED = 10.0
BENCH = Bench(
    __file__,
    __doc__,
    Option("--rounds", 7, "swaps on each side", smallest=1),
    Option("--rank", 16, "of the LoRA, in all attention layers"),
)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Swap a new LoRA in every round, on both models."""
    write_bench_model(folder / "model", SDXL.for_run(smallest=options.smallest))
    for name, model in (("sdxl", folder / "model"), ("miniature", WEIGHTS)):
        loras = [random_lora(model, folder / name, seed=seed, rank=options.rank) for seed in range(options.rounds + 1)]
        swaps = _swaps(model, loras)
        seconds = {side: median(each["seconds"] for each in rounds) for side, rounds in swaps.items()}
        for side, rounds in swaps.items():
            peak_mib = sheet.values[f"peak_mib_{side}_{name}"] = median(each["peak_mib"] for each in rounds)
            sheet.row(f"{name}: {side}", f"{1000 * seconds[side]:.1f} ms, {peak_mib:.0f} MiB")
        ratio = seconds["diffusers"] / seconds["suite"]
        sheet.figure(f"{name}: times faster", ratio, "{:.1f}", key=f"speedup_{name}", bar=f"at least {WANTED:g}")


def _swaps(model: Path, loras: Sequence[LoraFiles]) -> dict[str, list[Mapping[str, float]]]:
    """Return what each side took for each LoRA but the first one, which pays for what is made once."""
    with Side(diffusers, threads=THREADS, model=model) as theirs, Side(engine, threads=THREADS, model=model) as ours:
        return by_turns(
            {
                "diffusers": lambda number: theirs.ask(path=str(loras[number].theirs)),
                "suite": lambda number: ours.ask(path=str(loras[number].ours), digest=loras[number].digest),
            },
            len(loras) - 1,
        )


def diffusers(*, model: str) -> Answer:
    """Make Diffusers' side, which loads, fuses, unfuses and unloads a file."""
    pipeline = stock_pipeline(model)
    loaded_kib = _memory_kib("VmRSS")

    def swap(*, path: str) -> dict[str, float]:
        def work() -> None:
            pipeline.load_lora_weights(path, use_safetensors=True)
            pipeline.fuse_lora()
            pipeline.unfuse_lora()
            pipeline.unload_lora_weights()

        return _measured(work, loaded_kib)

    return swap


def engine(*, model: str) -> Answer:
    """Make the suite's side, which fetches a canonical file, patches the weights and restores them."""
    from bottega.addons.loras.engine import LoraAtScale, LoraRef, LoraWeights
    from load.bench.engine_runs import load_bench_model
    from load.bench.local_loras import LocalLoras

    loaded = load_bench_model(model)
    loaded_kib = _memory_kib("VmRSS")
    files: dict[str, Path] = {}
    source, weights = LocalLoras(files), LoraWeights(loaded)

    def swap(*, path: str, digest: str) -> dict[str, float]:
        files[digest] = Path(path)

        def work() -> None:
            handle = source.begin(LoraRef(name="bench", digest=digest))
            while not handle.ready:
                source.settle([handle], 1.0)
            layers = {name: handle.layers(name) for name in ("text_encoder", "text_encoder_2", "unet")}
            uses = [LoraAtScale(digest=digest, scale=1.0, layers=layers)]
            weights.put_in_text(weights.text_set(uses))
            weights.put_in_denoiser(weights.denoiser_set(uses))
            source.close([handle])
            weights.put_in_text(None)
            weights.put_in_denoiser(None)

        return _measured(work, loaded_kib)

    return swap


def _measured(work: Callable[[], None], loaded_kib: int) -> dict[str, float]:
    """Return the seconds of the work, and the peak of this process's memory above that of the loaded model."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
    began_s = perf_counter()
    work()
    seconds = perf_counter() - began_s
    return {"seconds": seconds, "peak_mib": (_memory_kib("VmHWM") - loaded_kib) / 1024}


def _memory_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.exit(BENCH.command())
