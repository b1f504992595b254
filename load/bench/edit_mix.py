"""What do edits and pictures at once take, in images per second: the engine against Diffusers, one by one?

Half of the requests are edits of templates that were edited before, with masks of several sizes and masked blocks; the
others are plain. A bench model of SDXL's topology. Each side is a process of its own; they take turns, medians.

A run takes 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from load.bench.bench_model import write_bench_model
from load.bench.edit_model import EDIT_SHAPE, SIZE, square_box, square_mask, template, write_template
from load.bench.framework import GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet, by_turns
from load.bench.side_process import Answer, Side
from load.bench.stock import stock

# Shares of the tokens that edits compute at the finest level of attention; 0 is a plain picture.
MIX = (0.05, 0.0, 0.11, 0.0, 0.19, 0.0, 0.35, 0.0)
WANTED = 1.5
# All templates of a round, and what is recorded of them.
_RECORDINGS_BYTES = 4 << 30
BENCH = Bench(
    __file__,
    __doc__,
    Option("--rounds", 5, "of all requests, on each side", smallest=1),
    Option("--steps", 8, "of each request", smallest=2),
    Option("--threads", 2, "of each side"),
)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Draw in turns: all requests at once, and the edits and the plain ones apart."""
    model = folder / "model"
    write_bench_model(model, EDIT_SHAPE.for_run(smallest=options.smallest))
    files = [write_template(folder, number) for number in range(len(MIX))]
    common = {"threads": options.threads, "exclusive_cores": True, "model": model}
    with Side(stock, **common) as theirs, Side(engine, **common) as ours:

        def one_by_one(_: int) -> dict[str, float]:
            seconds = 0.0
            for number, share in enumerate(MIX):
                edit = {"images": [files[number]], "boxes": [square_box(share)]} if share else {"size": SIZE}
                seconds += theirs.ask(prompts=[PROMPT], seeds=[number], steps=options.steps, **edit)["seconds"]
            return {"seconds": seconds}

        def at_once(shares: Sequence[float]) -> Mapping[str, float]:
            return ours.ask(shares=shares, steps=options.steps)

        found = by_turns(
            {
                "diffusers": one_by_one,
                "mixed": lambda _: at_once(MIX),
                "edits": lambda _: at_once([share for share in MIX if share]),
                "plain": lambda _: at_once([share for share in MIX if not share]),
            },
            options.rounds,
        )
    seconds = {name: median(each["seconds"] for each in rounds) for name, rounds in found.items()}
    sheet.figure(f"{len(MIX)} requests one by one, Diffusers", seconds["diffusers"], "{:.2f} s", key="diffusers_s")
    sheet.figure("    at once", seconds["mixed"], "{:.2f} s", key="mixed_s")
    ratio, bar = seconds["diffusers"] / seconds["mixed"], f"at least {WANTED:g}"
    sheet.figure("times as many images per second", ratio, key="mix_ratio", bar=bar)
    apart = (seconds["edits"] + seconds["plain"]) / seconds["mixed"]
    sheet.figure("edits together, then plain ones together, over all at once", apart, key="vs_apart")
    reused = median(each["reused_share"] for each in found["mixed"])
    sheet.figure("blocks of the edits whose unmasked tokens were reused", reused, key="blocks_reused_share")


def engine(*, model: str) -> Answer:
    """Make the suite's engine, which draws a request for each share.

    Templates have been edited before: the first question with a set of shares does that, not timed.
    """
    from bottega.addons.edits.engine.addon import EngineEdits
    from bottega.addons.edits.engine.recordings.source import MemoryActivations
    from bottega.engine.engine import Engine
    from bottega.engine.job import EngineOrder
    from bottega.engine.limits import EngineLimits
    from bottega.engine.spec import ResolvedSpec
    from load.bench.engine_runs import edit_order, load_bench_model, reused_share, run_orders

    loaded = load_bench_model(model)
    running = Engine(loaded, EngineLimits(), addons=(EngineEdits(loaded, MemoryActivations(_RECORDINGS_BYTES)),))
    running.warm_up()
    known: set[tuple[float, ...]] = set()

    def order(number: int, share: float, steps: int) -> EngineOrder:
        if share:
            mask = square_mask(share)
            return edit_order(number, template(number), mask, steps=steps, seed=number, any_prompt=False)
        spec = ResolvedSpec(
            prompt=PROMPT,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE_SCALE,
            width=SIZE,
            height=SIZE,
            seed=number,
        )
        return EngineOrder(key=number, spec=spec)

    def draw(*, shares: Sequence[float], steps: int) -> dict[str, float]:
        orders = [order(number, share, steps) for number, share in enumerate(shares)]
        if tuple(shares) not in known:
            known.add(tuple(shares))
            run_orders(running, [each for each in orders if each.spec.edit is not None])
        began_s = perf_counter()
        records = run_orders(running, orders)
        return {"seconds": perf_counter() - began_s, "reused_share": reused_share(list(records.values()))}

    return draw


if __name__ == "__main__":
    sys.exit(BENCH.command())
