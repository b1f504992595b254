"""What does one picture of the embedded model take of the processor, by process, while eight clients draw?

On a busy machine this counts, and not only the time on the clock: what gateway, fronts and codecs take is taken from
the engine, or from other programs. The engine's own part is the picture; the rest is what the suite costs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import psutil

from bottega.client import AsyncClient
from load.bench.framework import GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet, closed_loop, medians
from load.bench.suites import Suite, processor_s, suite

STEPS = 20
CLIENTS = 8
# In the order of a request's way.
NAMES = ("client", "gateway", "gateway's codecs", "worker's front", "worker's engine", "worker's codecs")
BENCH = Bench(
    __file__,
    __doc__,
    Option("--pictures", 64, "of a round", smallest=2),
    Option("--rounds", 5, "of pictures", smallest=1),
    Option("--threads", 1, "of torch, in the engine"),
    heads=("a picture", "share"),
)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Start the suite, and draw in rounds."""
    services = {"worker": {"engine": {"model": "miniature", "threads": options.threads}}}
    with suite(folder / "suite", services) as running:
        taken_ms, per_s = asyncio.run(_draw(running, options))
    whole = sum(taken_ms.values())
    for name, ms in taken_ms.items():
        sheet.row(name, f"{ms:.1f} ms", f"{ms / whole:.1%}")
        sheet.values[f"{name.replace(chr(39) + 's ', '_').replace(' ', '_')}_ms"] = ms
    sheet.row("all", f"{whole:.1f} ms")
    beside, key = whole - taken_ms["worker's engine"], "beside_engine_ms"
    sheet.figure("all but the engine", beside, "{:.1f} ms", key=key, bar=f"{beside / whole:.1%}")
    sheet.figure("pictures a second", per_s, key="pictures_per_s")
    sheet.values |= {"pictures": options.pictures, "rounds": options.rounds, "threads": options.threads}


async def _draw(running: Suite, options: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Return processor milliseconds of a picture, by process, and pictures a second: medians of the rounds."""
    rounds: dict[str, list[float]] = {name: [] for name in NAMES}
    per_s = []
    async with AsyncClient(running.address) as client:

        async def draw(seed: int) -> None:
            await client.generate(PROMPT, seed=seed, num_inference_steps=STEPS, guidance_scale=GUIDANCE_SCALE)

        await closed_loop(draw, requests=2 * CLIENTS, clients=CLIENTS)  # warms everything up
        for _ in range(options.rounds):
            before = _spent(running)
            per_s.append(await closed_loop(draw, requests=options.pictures, clients=CLIENTS))
            after = _spent(running)
            for name in NAMES:
                rounds[name].append((after[name] - before[name]) / options.pictures * 1e3)
    return medians(rounds), median(per_s)


def _spent(running: Suite) -> dict[str, float]:
    """Return processor seconds so far, of users and of the kernel for them, by process."""
    spent: dict[str, float] = defaultdict(float, {"client": time.process_time()})
    worker = running.members["worker"]
    for service, own, owner in ((running.gateway, "gateway", "gateway's"), (worker, "worker's front", "worker's")):
        process = psutil.Process(service.process.pid)
        spent[own] += processor_s(process.pid)
        for child in process.children(recursive=True):
            is_codec = "bottega.codec.process" in child.cmdline()
            spent[f"{owner} {'codecs' if is_codec else 'engine'}"] += processor_s(child.pid)
    return spent


if __name__ == "__main__":
    sys.exit(BENCH.command())
