"""A store with many LoRAs, asked for as a production trace did: how often one is at hand by budget, and what each tier
costs.

One client, the embedded model, random LoRAs of mixed ranks; requests come one after the other, the same ones for every
budget of the store, which begins empty each time, as the worker does. A request counts to the coldest tier that one of
its LoRAs came from.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from bottega.miniature import WEIGHTS
from bottega.process.memory import resident_bytes
from load.bench.lora_files import random_lora
from load.bench.lora_suite import Cast, LoraSuite, figures, suite
from load.bench.report import percentile, report
from load.bench.scratch import scratch
from load.replay.trace_shape import LORAS, AdapterCalls
from tests.support.services import Service
from tests.support.waiting import wait_until

MODEL = "miniature"
PROMPT = "a big red star on the left on a blue background"
RANKS = (2, 4, 8, 16)
# Of all LoRAs' bytes, what the worker keeps beside those that it needs, as float32.
WORKER_SHARE = 0.05
# Requests up to this share of them fill memory, and their growth is not counted.
LEARNING = 0.25
TIERS = ("worker", "memory", "disk")
MIB = 1 << 20
LEAVE_S = 20.0
GROWTH_MIB = 64.0


@dataclass(slots=True, kw_only=True)
class Replayed:
    """What came of one run. calls: LoRAs asked for, by the tier that they came from. seconds: of requests, by tier.

    held: the most bytes of LoRAs that the store had in memory, over its budget. growth_mib: of worker and store.
    """

    calls: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    held: float = 0.0
    growth_mib: dict[str, float] = field(default_factory=dict)

    def share(self, *tiers: str) -> float:
        """Of the calls, those that came from there."""
        return sum(self.calls[tier] for tier in tiers) / self.calls.total()

    @property
    def store_hits(self) -> float:
        """Of the calls that came to the store, those that it had in memory."""
        asked = self.calls["memory"] + self.calls["disk"]
        return self.calls["memory"] / asked if asked else 1.0


def run(
    before: LoraSuite, requests: Sequence[tuple[int, ...]], budget_bytes: int, steps: int
) -> tuple[LoraSuite, Replayed]:
    """All requests, with an empty store of that budget and a worker that has nothing; and the suite with that store."""
    running = before.restart_store({"budget_bytes": budget_bytes})
    worker = running.start_worker()
    replayed = _replay(running, worker, requests, budget_bytes, steps)
    worker.stop()
    wait_until(lambda: not running.client.models(), "the worker to leave", within_s=LEAVE_S)
    return running, replayed


def _replay(
    running: LoraSuite, worker: Service, requests: Sequence[tuple[int, ...]], budget_bytes: int, steps: int
) -> Replayed:
    replayed = Replayed()
    memory: list[tuple[int, int]] = []
    _draw(running, (), 0, steps)
    before = figures(running.store)
    for number, ranks in enumerate(requests):
        began_s = time.perf_counter()
        _draw(running, ranks, number, steps)
        seconds = time.perf_counter() - began_s
        after = figures(running.store)
        calls = calls_by_tier(before, after, len(ranks))
        replayed.calls += calls
        replayed.seconds[max(calls, key=TIERS.index)].append(seconds)
        replayed.held = max(replayed.held, after["bottega_lora_memory_bytes"] / budget_bytes)
        memory.append((_resident(worker), _resident(running.store)))
        before = after
    settled = memory[int(LEARNING * len(memory)) :]
    for index, name in enumerate(("worker", "store")):
        sizes = [each[index] for each in settled]
        replayed.growth_mib[name] = (max(sizes) - sizes[0]) / MIB
    return replayed


def _draw(running: LoraSuite, ranks: Sequence[int], seed: int, steps: int) -> None:
    running.client.generate(PROMPT, seed=seed, num_inference_steps=steps, lora=[_name(rank) for rank in ranks])


def calls_by_tier(before: dict[str, float], after: dict[str, float], asked: int) -> Counter[str]:
    """Where a request's LoRAs came from. The disk is also where the store's memory had one only because the gateway had
    told it of a request."""

    def fetched(tier: str) -> int:
        name = f"bottega_lora_fetches_total:{tier}"
        return int(after.get(name, 0.0) - before.get(name, 0.0))

    memory, disk = fetched("memory"), fetched("loaded") + fetched("disk")
    return +Counter({"worker": asked - memory - disk, "memory": memory, "disk": disk})


def _resident(service: Service) -> int:
    """Of it and the processes that it has started."""
    process = psutil.Process(service.process.pid)
    return resident_bytes([process.pid, *(child.pid for child in process.children(recursive=True))])


def fill(running: LoraSuite, folder: Path, count: int) -> int:
    """Makes so many LoRAs and brings them to the store; their bytes there."""

    def bring(number: int) -> int:
        lora = random_lora(WEIGHTS, folder, seed=number, rank=RANKS[number % len(RANKS)])
        size_bytes = running.client.add_lora(_name(number), lora.theirs).size_bytes
        lora.theirs.unlink()
        lora.ours.unlink()
        return size_bytes

    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(bring, range(count)))


def _name(rank: int) -> str:
    return f"lora{rank}"


def measure(folder: Path, options: argparse.Namespace) -> tuple[dict[tuple[str, float], Replayed], float]:
    """By service and by the budget's share of all LoRAs; and the seconds that a LoRA took to be brought."""
    (folder / "made").mkdir()
    found: dict[tuple[str, float], Replayed] = {}
    cast = Cast(
        folder=folder / "suite",
        model=MODEL,
        base=MODEL,
        engine={"threads": os.cpu_count() or 1, "loras": {"budget_bytes": 1}},
        store={},
        controlnets={},
        worker=False,
    )
    with suite(cast) as running:
        began_s = time.perf_counter()
        total_bytes = fill(running, folder / "made", options.loras)
        add_s = (time.perf_counter() - began_s) / options.loras
        bounded = running.with_engine({**cast.engine, "loras": {"budget_bytes": int(2 * WORKER_SHARE * total_bytes)}})
        for trace in LORAS.values():
            requests = drawn(trace, options.loras, options.requests)
            for share in options.budgets:
                budget_bytes = max(1, int(share * total_bytes))
                bounded, found[trace.name, share] = run(bounded, requests, budget_bytes, options.steps)
    return found, add_s


def drawn(trace: AdapterCalls, loras: int, requests: int) -> list[tuple[int, ...]]:
    """The same for every budget."""
    return list(itertools.islice(trace.draw(random.Random(trace.name), count=loras), requests))


def _report(found: dict[tuple[str, float], Replayed], add_s: float, loras: int) -> None:
    rows: list[tuple[str, str, str]] = []
    values: dict[str, float] = {"add_s": add_s}
    for (name, share), replayed in found.items():
        key = f"{name.lower()}_{round(100 * share)}"
        said = ", ".join(f"{tier} {replayed.share(tier):.2f}" for tier in TIERS)
        rows += [
            (f"service {name}, room in the store for {share:.0%}: calls by tier", said, ""),
            ("    of those that came to the store, in memory", f"{replayed.store_hits:.2f}", ""),
        ]
        values |= {f"store_hits_{key}": replayed.store_hits, f"worker_hits_{key}": replayed.share("worker")}
    for tier in TIERS:
        seconds = [each for replayed in found.values() for each in replayed.seconds[tier]]
        if seconds:
            said = f"{1000 * median(seconds):.0f} ms, {1000 * percentile(seconds, 0.95):.0f} ms, {len(seconds)}"
            rows.append((f"latency, {tier}: median, p95, requests", said, ""))
            values |= {f"latency_{tier}_ms": 1000 * median(seconds), f"p95_{tier}_ms": 1000 * percentile(seconds, 0.95)}
    held = max(replayed.held for replayed in found.values())
    rows.append(("most LoRAs in the store's memory, of its budget", f"{held:.3f}", "at most 1"))
    values["held_of_budget"] = held
    for name in ("worker", "store"):
        growth_mib = max(replayed.growth_mib[name] for replayed in found.values())
        rows.append((f"the {name} grew by", f"{growth_mib:.1f} MiB", f"at most {GROWTH_MIB:g} MiB"))
        values[f"{name}_growth_mib"] = growth_mib
    for trace in LORAS.values():
        top = trace.top_share(loras)
        rows.append((f"of all calls of service {trace.name}, those to so many LoRAs", f"{top:.2f}", ""))
        values[f"top_share_{trace.name.lower()}"] = top
    rows.append(("bringing a LoRA, two at a time", f"{add_s:.2f} s", ""))
    report("lora-trace", rows, values)


def main() -> None:
    """Prints the table and the line of JSON."""
    parser = argparse.ArgumentParser(prog="make bench-lora-trace", description=__doc__)
    parser.add_argument("--loras", type=int, default=500, help="in the store, 6,980 at most (default: 500)")
    parser.add_argument("--requests", type=int, default=300, help="for each service and budget (default: 300)")
    parser.add_argument("--steps", type=int, default=4, help="of a picture (default: 4)")
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=[0.05, 0.2, 0.5], help="of the store, as shares of all LoRAs' bytes"
    )
    options = parser.parse_args()
    with scratch() as folder:
        found, add_s = measure(folder, options)
    _report(found, add_s, options.loras)


if __name__ == "__main__":
    main()
