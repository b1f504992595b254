"""What one picture of the embedded model takes of the processor, by process, while eight clients draw.

Whoever serves pictures on a busy machine feels this and not only the time on the clock: what gateway, fronts and codecs
take is taken from the engine, or from somebody else. The engine's own part is the picture; the rest is what the suite
costs.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping
from statistics import median

import psutil

from bottega.client import AsyncClient, Client
from load.bench.closed_loop import closed_loop
from load.bench.report import report
from load.bench.scratch import scratch
from load.bench.suite import JOIN_TIMEOUT_S
from tests.support.services import Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

PROMPT = "a big red star on the left on a blue background"
GUIDANCE_SCALE = 5.0
STEPS = 20
CLIENTS = 8
# In the order of a request's way.
NAMES = ("client", "gateway", "gateway's codecs", "worker's front", "worker's engine", "worker's codecs")

Seconds = Mapping[str, float]


def main() -> None:
    """Measures and reports."""
    options = _options()
    with scratch() as folder, Services(folder) as services:
        gateway = services.start("gateway", gateway_config())
        engine = {"model": "miniature", "threads": options.threads}
        worker = services.start("worker", worker_config(gateway.fleet, name="worker", engine=engine))
        with Client(gateway.address) as client:
            wait_until(lambda: bool(client.models()), "the worker to join", within_s=JOIN_TIMEOUT_S)
        rounds, per_s = asyncio.run(_measure(gateway, worker, options))
    _report(rounds, per_s, options)


async def _measure(gateway: Service, worker: Service, options: argparse.Namespace) -> tuple[list[Seconds], list[float]]:
    """Processor seconds of a picture, by process, and pictures a second: one of each for each round."""
    rounds: list[Seconds] = []
    per_s = []
    async with AsyncClient(gateway.address) as client:

        async def draw(seed: int) -> None:
            await client.generate(PROMPT, seed=seed, num_inference_steps=STEPS, guidance_scale=GUIDANCE_SCALE)

        await closed_loop(draw, requests=2 * CLIENTS, clients=CLIENTS)  # warms everybody up
        for _ in range(options.rounds):
            before = _spent(gateway, worker)
            per_s.append(await closed_loop(draw, requests=options.pictures, clients=CLIENTS))
            after = _spent(gateway, worker)
            rounds.append({name: (after[name] - before[name]) / options.pictures for name in NAMES})
    return rounds, per_s


def _spent(gateway: Service, worker: Service) -> dict[str, float]:
    """Processor seconds so far, of users and of the kernel for them, by process."""
    spent: dict[str, float] = defaultdict(float, {"client": time.process_time()})
    for service, own, is_worker in ((gateway, "gateway", False), (worker, "worker's front", True)):
        process = psutil.Process(service.process.pid)
        spent[own] += _seconds(process)
        for child in process.children(recursive=True):
            is_codec = "bottega.codec.process" in child.cmdline()
            whose = "worker's" if is_worker else "gateway's"
            spent[f"{whose} {'codecs' if is_codec else 'engine'}"] += _seconds(child)
    return spent


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _report(rounds: list[Seconds], per_s: list[float], options: argparse.Namespace) -> None:
    of = {name: median(seconds[name] for seconds in rounds) * 1e3 for name in NAMES}
    whole = sum(of.values())
    beside = whole - of["worker's engine"]
    rows = [(name, f"{ms:.1f} ms", f"{ms / whole:.1%}") for name, ms in of.items()]
    rows.append(("all", f"{whole:.1f} ms", ""))
    rows.append(("all but the engine (beside_engine_ms)", f"{beside:.1f} ms", f"{beside / whole:.1%}"))
    rows.append(("pictures a second", f"{median(per_s):.2f}", ""))
    values = {f"{_key(name)}_ms": ms for name, ms in of.items()}
    values |= {
        "beside_engine_ms": beside,
        "pictures_per_s": median(per_s),
        "pictures": options.pictures,
        "rounds": options.rounds,
        "threads": options.threads,
    }
    report("processor-time", rows, values, heads=("a picture", "share"))


def _key(name: str) -> str:
    return name.replace("'s ", "_").replace(" ", "_")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=64, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in the engine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
