"""What do eight requests with eight different LoRAs at once cost, in images per second?

The engine, which gets LoRAs from files, against Diffusers, which swaps one by one, and against itself without LoRAs; on
an embedded model and on a wide bench model of its kind. Each side is a process of its own; they take turns, and medians
are compared.

A run takes 10 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from bottega.client.types.models import EMBEDDED_MODEL
from bottega.model_files.family_names import TRANSFORMER
from bottega.model_files.folder_check import folder_of
from load.bench.bench_model import BenchShape, write_bench_model
from load.bench.framework import GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet, by_turns, medians
from load.bench.lora_files import LoraFiles, random_lora
from load.bench.side_process import Answer, Side
from load.bench.stock import stock
from load.bench.transformer_model import TransformerShape, write_transformer_model

WIDE = BenchShape(block_out_channels=(128, 256, 512), transformer_layers=(1, 2))
WIDE_TRANSFORMER = TransformerShape(heads=6, blocks=6)
REQUESTS, THREADS = 8, 2
WANTED_MINIATURE, WANTED_BENCH = 0.7, 0.85
BENCH = Bench(
    __file__,
    __doc__,
    Option("--rounds", 5, "of all requests, on each side", smallest=1),
    Option("--steps", 20, "of the embedded model's requests", smallest=2),
    Option("--bench-steps", 4, "of the wide bench model's", smallest=2),
    Option("--rank", 16, "of the LoRAs, in all attention layers"),
    Option("--model", EMBEDDED_MODEL, "an embedded model, or a trained folder"),
)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Compare on both models."""
    small = folder_of(options.model)
    sheet.name_model(options.model)
    side = _write_wide(folder / "model", transformer=(small / TRANSFORMER).is_dir(), smallest=options.smallest)
    models = (
        ("miniature", "", small, options.steps, 64, WANTED_MINIATURE),
        ("wide model", "_bench", folder / "model", options.bench_steps, side, WANTED_BENCH),
    )
    for name, key, model, steps, size, wanted in models:
        loras = [random_lora(model, folder / name, seed=seed, rank=options.rank) for seed in range(REQUESTS)]
        found = _compare(model, loras, steps=steps, size=size, rounds=options.rounds)
        over = found["swapping"] / found["mixed"]
        sheet.figure(f"{name}: against Diffusers swapping", over, key=f"vs_swapping{key}")
        left = found["none"] / found["mixed"]
        sheet.figure(f"{name}: against no LoRAs", left, key=f"vs_none{key}", bar=f"at least {wanted:g}")


def _write_wide(folder: Path, *, transformer: bool, smallest: bool) -> int:
    """Write the wide model; return the side of its pictures."""
    if transformer:
        wide = WIDE_TRANSFORMER.for_run(smallest=smallest)
        write_transformer_model(folder, wide)
        return wide.side
    shape = WIDE.for_run(smallest=smallest)
    write_bench_model(folder, shape)
    return shape.side


def _compare(model: Path, loras: Sequence[LoraFiles], *, steps: int, size: int, rounds: int) -> dict[str, float]:
    """Return the median seconds for all requests, by side."""
    loras_of_ours = [{"path": str(lora.ours), "digest": lora.digest} for lora in loras]
    with Side(stock, threads=THREADS, model=model) as theirs, Side(engine, threads=THREADS, model=model) as ours:

        def swapping(_: int) -> float:
            return sum(
                theirs.ask(
                    prompts=[PROMPT], seeds=[seed], steps=steps, size=size, loras=[str(lora.theirs)], fuse=False
                )["seconds"]
                for seed, lora in enumerate(loras)
            )

        return medians(
            by_turns(
                {
                    "swapping": swapping,
                    "mixed": lambda _: ours.ask(loras=loras_of_ours, steps=steps, size=size)["seconds"],
                    "none": lambda _: ours.ask(loras=[None] * len(loras), steps=steps, size=size)["seconds"],
                },
                rounds,
            )
        )


def engine(*, model: str) -> Answer:
    """Make the suite's engine: it draws a picture with each LoRA, or None, all at once."""
    from bottega.engine.job import EngineOrder
    from bottega.engine.limits import EngineLimits
    from bottega.engine.spec import LoraSpec, ResolvedSpec
    from load.bench.engine_runs import load_bench_model, run_orders
    from load.bench.local_loras import LocalLoras
    from tests.support.engines import make_engine

    files: dict[str, Path] = {}
    loaded = load_bench_model(model)
    running = make_engine(loaded, EngineLimits(), loras=LocalLoras(files))
    running.warm_up()

    def draw(*, loras: Sequence[dict[str, str] | None], steps: int, size: int) -> dict[str, float]:
        files.update({lora["digest"]: Path(lora["path"]) for lora in loras if lora})
        orders = [
            EngineOrder(
                key=seed,
                spec=ResolvedSpec(
                    prompt=PROMPT,
                    num_inference_steps=steps,
                    guidance_scale=GUIDANCE_SCALE,
                    width=size,
                    height=size,
                    seed=seed,
                    sampler=loaded.defaults.sampler,
                    loras=(LoraSpec(name="bench", digest=lora["digest"]),) if lora else (),
                ),
            )
            for seed, lora in enumerate(loras)
        ]
        began_s = perf_counter()
        run_orders(running, orders)
        return {"seconds": perf_counter() - began_s}

    return draw


if __name__ == "__main__":
    sys.exit(BENCH.command())
