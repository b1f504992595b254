"""How long does the first request for a new LoRA take: on the warm base, and on a worker that is started for it?

Two fleets on the same two cores, each with a gateway and a store, take turns; in one a worker serves the base all the
time, in the other each request starts a worker and waits until it has joined. Medians are compared. Stock Diffusers
started for the request, in a process of its own, is beside them.

A run takes 4 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median

from load.bench.bench_model import BenchShape, write_bench_model
from load.bench.framework import GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet, seconds_of
from load.bench.lora_files import LoraFiles, cold_engine, cold_services, random_lora
from load.bench.side_process import Side
from load.bench.stock import stock
from load.bench.suites import Suite, suite
from tests.support.waiting import wait_until

THREADS, RANK = 2, 16
# SDXL's levels and depths at a tenth of its width: the time that its layers take to be made and loaded.
SHAPE = BenchShape(block_out_channels=(32, 64, 128), transformer_layers=(2, 10), sample_size=32)
WANTED = 2.7
JOIN_S = 60.0
BENCH = Bench(
    __file__,
    __doc__,
    Option("--rounds", 7, "new LoRAs", smallest=1),
    Option("--steps", 30, "of a picture", smallest=2),
)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Make a new LoRA in every round, with which everybody draws once."""
    model, seconds = folder / "model", defaultdict[str, list[float]](list)
    write_bench_model(model, SHAPE.for_run(smallest=options.smallest))
    with (
        suite(folder / "warm", cold_services(model, THREADS)) as warm,
        suite(folder / "new", cold_services(model, THREADS, worker=False)) as new,
    ):
        for number in range(options.rounds + 1):
            lora = random_lora(model, folder / "files", seed=number, rank=RANK)
            add_s = seconds_of(partial(warm.client.add_lora, f"lora{number}", lora.theirs))
            new.client.add_lora(f"lora{number}", lora.theirs)
            warm_s = _draw(warm, number, options.steps)
            if number == 0:  # the base is warm from the first one on
                continue
            seconds["add_s"].append(add_s)
            seconds["warm_s"].append(warm_s)
            seconds["starting_s"].append(seconds_of(lambda: _start_worker(new, model)))
            seconds["new_s"].append(seconds["starting_s"][-1] + _draw(new, number, options.steps))
            new.members.pop("worker").stop()
            wait_until(lambda: not new.client.models(), "the worker to leave", within_s=JOIN_S)
            seconds["diffusers_s"].append(seconds_of(partial(_draw_stock, model, lora, number, options.steps)))
    found = {name: median(values) for name, values in seconds.items()}
    warm_s, new_s, add_s = found["warm_s"], found["new_s"], found["add_s"]
    sheet.figure("on the warm base", warm_s, "{:.2f} s", key="warm_s")
    sheet.figure("on a worker started for it", new_s, "{:.2f} s", key="new_s")
    sheet.figure("    of which it starts", found["starting_s"], "{:.2f} s", key="starting_s")
    sheet.figure("new worker over warm base", new_s / warm_s, key="cold_speedup", bar=f"at least {WANTED:g}")
    with_upload = (new_s + add_s) / (warm_s + add_s)
    sheet.figure("    both with bringing the LoRA to the store", with_upload, key="cold_speedup_with_upload")
    sheet.figure("Diffusers started for it", found["diffusers_s"], "{:.2f} s", key="diffusers_s")
    sheet.figure("    over warm base", found["diffusers_s"] / warm_s, key="diffusers_speedup")
    sheet.values["add_s"] = add_s


def _draw(running: Suite, number: int, steps: int) -> float:
    return running.draw(
        PROMPT, seed=number, num_inference_steps=steps, guidance_scale=GUIDANCE_SCALE, lora=[f"lora{number}"]
    )[1]


def _start_worker(running: Suite, model: Path) -> None:
    running.start("worker", {"engine": cold_engine(model, THREADS)})
    running.wait_until_joined()


def _draw_stock(model: Path, lora: LoraFiles, number: int, steps: int) -> None:
    with Side(stock, threads=THREADS, model=model) as reference:
        reference.ask(prompts=[PROMPT], seeds=[number], steps=steps, loras=[str(lora.theirs)])


if __name__ == "__main__":
    sys.exit(BENCH.command())
