"""The first request for a LoRA that was never asked for: on the warm base, and on a worker that is started for it.

Two fleets on the same two cores, each with a gateway and a store, take turns; in one a worker serves the base all the
time, in the other each request starts a worker and waits until it has joined. Medians. Stock Diffusers started for the
request, in a process of its own, is beside them.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from load.bench.addon_reference import GUIDANCE_SCALE, PROMPT, AddonReference, Ask
from load.bench.bench_model import BenchShape, write_bench_model
from load.bench.lora_files import LoraFiles, random_lora
from load.bench.lora_suite import JOIN_S, Cast, LoraSuite, cold_cast, suite
from load.bench.report import report
from load.bench.scratch import scratch
from tests.support.waiting import wait_until

BASE = "bench"
THREADS = 2
RANK = 16
# SDXL's levels and depths at a tenth of its width: the time that its layers take to be made and loaded.
SHAPE = BenchShape(block_out_channels=(32, 64, 128), transformer_layers=(2, 10), sample_size=32)
WANTED = 2.7


@dataclass(slots=True, kw_only=True)
class Measured:
    """Seconds, one for each round. starting_s: until a new worker had joined; add_s: to bring a LoRA to a store."""

    warm_s: list[float] = field(default_factory=list)
    new_s: list[float] = field(default_factory=list)
    starting_s: list[float] = field(default_factory=list)
    diffusers_s: list[float] = field(default_factory=list)
    add_s: list[float] = field(default_factory=list)


def measure(folder: Path, options: argparse.Namespace) -> Measured:
    """In every round a new LoRA, and everybody draws once with it."""
    model = folder / "model"
    write_bench_model(model, SHAPE)
    (folder / "loras").mkdir()
    measured = Measured()
    with suite(_cast(folder, "warm", worker=True)) as warm, suite(_cast(folder, "new", worker=False)) as new:
        for number in range(options.rounds + 1):
            lora = random_lora(model, folder / "loras", seed=number, rank=RANK)
            add_s = _add(warm, lora, number)
            _add(new, lora, number)
            warm_s = _draw(warm, number, options.steps)
            if number:  # the base is warm from the first one on
                measured.add_s.append(add_s)
                measured.warm_s.append(warm_s)
                _start(new, number, options.steps, measured)
                measured.diffusers_s.append(_stock(model, lora, number, options.steps))
    return measured


def _add(running: LoraSuite, lora: LoraFiles, number: int) -> float:
    began_s = time.perf_counter()
    running.client.add_lora(_name(number), lora.theirs)
    return time.perf_counter() - began_s


def _draw(running: LoraSuite, number: int, steps: int) -> float:
    began_s = time.perf_counter()
    running.client.generate(
        PROMPT, seed=number, num_inference_steps=steps, guidance_scale=GUIDANCE_SCALE, lora=[_name(number)]
    )
    return time.perf_counter() - began_s


def _start(new: LoraSuite, number: int, steps: int, measured: Measured) -> None:
    """Starts a worker for one picture, and stops it."""
    began_s = time.perf_counter()
    worker = new.start_worker()
    measured.starting_s.append(time.perf_counter() - began_s)
    measured.new_s.append(measured.starting_s[-1] + _draw(new, number, steps))
    worker.stop()
    wait_until(lambda: not new.client.models(), "the worker to leave", within_s=JOIN_S)


def _stock(model: Path, lora: LoraFiles, number: int, steps: int) -> float:
    began_s = time.perf_counter()
    with AddonReference(model, THREADS) as reference:
        reference.draw(Ask(seed=number, steps=steps, loras=[str(lora.theirs)]))
        return time.perf_counter() - began_s


def _cast(folder: Path, name: str, *, worker: bool) -> Cast:
    return cold_cast(folder / name, folder / "model", base=BASE, threads=THREADS, worker=worker)


def _name(number: int) -> str:
    return f"lora{number}"


def main() -> None:
    """Prints the table and the line of JSON."""
    parser = argparse.ArgumentParser(prog="make bench-cold-lora", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="new LoRAs (default: 7)")
    parser.add_argument("--steps", type=int, default=30, help="of a picture (default: 30)")
    options = parser.parse_args()
    with scratch() as folder:
        measured = measure(folder, options)
    warm_s, new_s, add_s = median(measured.warm_s), median(measured.new_s), median(measured.add_s)
    values = {
        "cold_speedup": new_s / warm_s,
        "cold_speedup_with_upload": (new_s + add_s) / (warm_s + add_s),
        "diffusers_speedup": median(measured.diffusers_s) / warm_s,
        "warm_s": warm_s,
        "new_s": new_s,
        "starting_s": median(measured.starting_s),
        "diffusers_s": median(measured.diffusers_s),
        "add_s": add_s,
    }
    rows = [
        ("on the warm base", f"{warm_s:.2f} s", ""),
        ("on a worker started for it", f"{new_s:.2f} s", ""),
        ("    of which it starts", f"{values['starting_s']:.2f} s", ""),
        ("new worker over warm base (cold_speedup)", f"{values['cold_speedup']:.2f}", f"at least {WANTED:g}"),
        ("    both with bringing the LoRA to the store", f"{values['cold_speedup_with_upload']:.2f}", ""),
        ("Diffusers started for it", f"{values['diffusers_s']:.2f} s", ""),
        ("    over warm base", f"{values['diffusers_speedup']:.2f}", ""),
    ]
    report("cold-lora", rows, values)


if __name__ == "__main__":
    main()
