"""What do eight requests of four sizes gain if a transformer computes them in one forward pass?

The engine draws them one by one, at once in turns of one size, at once in turns of all sizes, and at once as it chooses
by what it has measured. The model is random, with the blocks of Stable Diffusion 3 or of Flux.1; small and large
pictures are drawn. Every picture is compared with the one that is drawn alone.

A run takes 5 minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

from bottega.device.devices import compute_with
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.model.schedulers import SamplerKind
from bottega.planning import PackedTimes
from load.bench.engine_runs import load_bench_model
from load.bench.framework import CORES, GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet, by_turns, medians, seconds_of
from load.bench.transformer_model import TransformerShape, write_transformer_model
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine
from tests.support.stock import deviation

SIZES = {
    "small": ((64, 64), (96, 64), (96, 96), (128, 128)),
    "large": ((256, 256), (384, 256), (384, 384), (512, 512)),
}
"""Width and height of the pictures."""
OF_EACH = 2
"""Requests of each size."""
EXACT = 1e-4
ALONE, BY_SIZE, PACKED, CHOSEN = "one by one", "by size", "all sizes", "chosen"
# Whether sizes share turns, by what these seem to take relative to turns of one size.
_SEEMS = {BY_SIZE: math.inf, PACKED: 0.0}
BENCH = Bench(
    __file__,
    __doc__,
    Option("--rounds", 3, "of all requests, on each side", smallest=1),
    Option("--steps", 8, "of each request", smallest=2),
    Option("--topology", "sd3", "of the model", choices=("sd3", "flux")),
    Option("--width", 384, "of the transformer in channels", smallest=128),
    Option("--blocks", 6, "of the transformer; two thirds of those of Flux.1 are single ones", smallest=2),
    Option("--threads", CORES, "of torch"),
)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Compare on small and on large pictures."""
    compute_with(options.threads)
    write_transformer_model(folder / "model", _shape(options))
    if options.topology != "sd3":
        sheet.bench = f"mixed-sizes-{options.topology}"
    for name, sizes in SIZES.items() if not options.smallest else [("small", SIZES["small"])]:
        _compare(name, folder / "model", _orders(sizes, options.steps), options.rounds, sheet)


def _shape(options: argparse.Namespace) -> TransformerShape:
    if options.topology == "sd3":
        return TransformerShape(heads=options.width // 64, blocks=options.blocks, sample_size=64)
    joint = max(1, options.blocks // 3)
    return TransformerShape(
        heads=options.width // 128, blocks=joint, single_blocks=options.blocks - joint, sample_size=64
    )


def _compare(name: str, model: Path, orders: Sequence[EngineOrder], rounds: int, sheet: Sheet) -> None:
    loaded = load_bench_model(model)
    engines = {side: ManualEngine(make_engine(loaded, EngineLimits())) for side in (ALONE, BY_SIZE, PACKED, CHOSEN)}
    for each in engines.values():
        each.engine.warm_up()

    def draw(side: str, _: int) -> float:
        groups = [[order] for order in orders] if side == ALONE else [orders]
        with _seeming(side):
            return seconds_of(lambda: [engines[side].run({0: group}) for group in groups])

    seconds = medians(by_turns({side: partial(draw, side) for side in engines}, rounds))
    for side, took_s in seconds.items():
        sheet.row(f"{name} pictures, {side}", f"{took_s:.2f} s")
    best_s = min(seconds[BY_SIZE], seconds[PACKED])
    sheet.figure(f"{name}: one by one over all sizes", seconds[ALONE] / seconds[PACKED], key=f"{name}_vs_alone")
    sheet.figure(f"{name}: by size over all sizes", seconds[BY_SIZE] / seconds[PACKED], key=f"{name}_vs_by_size")
    chosen = best_s / seconds[CHOSEN]
    sheet.figure(f"{name}: the faster one over the chosen", chosen, key=f"{name}_chosen", bar="at least 0.95")
    off = max(
        deviation(engines[side].drawings[order.key].latents[0], engines[ALONE].drawings[order.key].latents[0])
        for side in (BY_SIZE, PACKED, CHOSEN)
        for order in orders
    )
    sheet.figure(f"{name}: largest difference of a latent", off, "{:.7f}", key=f"{name}_off", bar=f"at most {EXACT:f}")


def _seeming(side: str) -> AbstractContextManager[object]:
    """Return a context in which the engine of a side does what its name says."""
    return mock.patch.object(PackedTimes, "ratio", _SEEMS[side]) if side in _SEEMS else nullcontext()


def _orders(sizes: Sequence[tuple[int, int]], steps: int) -> list[EngineOrder]:
    return [
        EngineOrder(
            key=(size, number),
            spec=ResolvedSpec(
                prompt=PROMPT,
                num_inference_steps=steps,
                guidance_scale=GUIDANCE_SCALE,
                width=size[0],
                height=size[1],
                seed=number,
                sampler=SamplerKind.FLOW_MATCH_EULER,
            ),
        )
        for number in range(OF_EACH)
        for size in sizes
    ]


if __name__ == "__main__":
    sys.exit(BENCH.command())
