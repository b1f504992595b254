"""How often is one of many LoRAs at hand, asked for as a production trace did, and what does each tier cost?

One client, the embedded model, random LoRAs of mixed ranks; requests come one after the other, the same ones for every
budget of the store, which begins empty each time, as the worker does. A request counts to the coldest tier that one of
its LoRAs came from.

A run takes 9 minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from bottega.miniature import WEIGHTS
from bottega.process.memory import resident_bytes
from load.bench.framework import CORES, PROMPT, Bench, Option, Sheet, percentile, seconds_of
from load.bench.lora_files import random_lora
from load.bench.suites import Suite, metrics_of, suite
from load.replay.trace_shape import LORAS
from tests.support.services import Service
from tests.support.waiting import wait_until

MODEL = "miniature"
RANKS = (2, 4, 8, 16)
# What the worker keeps beside the LoRAs that it needs, as float32, as a share of all LoRAs' bytes.
WORKER_SHARE = 0.05
# Requests up to this share of them fill memory, and growth in them is not counted.
LEARNING = 0.25
TIERS = ("worker", "memory", "disk")
MIB = 1 << 20
LEAVE_S = 20.0
GROWTH_MIB = 64.0
BENCH = Bench(
    __file__,
    __doc__,
    Option("--loras", 500, "in the store, 6,980 at most", smallest=4),
    Option("--requests", 300, "for each service and budget", smallest=3),
    Option("--steps", 4, "of a picture", smallest=1),
    Option("--budgets", [0.05, 0.2, 0.5], "of the store, as shares of all LoRAs' bytes", smallest=[0.5]),
)


@dataclass(slots=True, kw_only=True)
class Replayed:
    """A run with a budget."""

    calls: Counter[str] = field(default_factory=Counter)
    """LoRAs that were asked for, by the tier that they came from."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    """Seconds of requests, by tier."""
    held: float = 0.0
    """The most bytes of LoRAs that the store had in memory, over its budget."""
    growth_mib: dict[str, float] = field(default_factory=dict)
    """Growth of worker and store."""

    def share(self, tier: str) -> float:
        """Return the share of the calls that came from a tier."""
        return self.calls[tier] / self.calls.total()

    @property
    def store_hits(self) -> float:
        """The share of the calls to the store that it had in memory."""
        asked = self.calls["memory"] + self.calls["disk"]
        return self.calls["memory"] / asked if asked else 1.0


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Fill a store, and replay the trace for each service and budget."""
    store = {"bases": {MODEL: MODEL}}
    found: dict[tuple[str, float], Replayed] = {}
    with suite(folder / "suite", {"loras": store}) as running:
        sizes: list[int] = []
        add_s = seconds_of(lambda: sizes.extend(_fill(running, folder / "made", options.loras))) / options.loras
        loras = {"budget_bytes": int(2 * WORKER_SHARE * sum(sizes))}
        engine = {"model": MODEL, "threads": CORES, "loras": loras}
        for trace in LORAS.values():
            drawn = trace.draw(random.Random(trace.name), count=options.loras)
            requests = list(itertools.islice(drawn, options.requests))
            for share in options.budgets:
                budget_bytes = max(1, int(share * sum(sizes)))
                running.members["loras"].stop()
                running.wait_until_left("loras")
                running.start("loras", {**store, "budget_bytes": budget_bytes})
                worker = running.start("worker", {"engine": engine})
                running.wait_until_joined()
                found[trace.name, share] = _replay(running, requests, budget_bytes, options.steps)
                worker.stop()
                del running.members["worker"]
                wait_until(lambda: not running.client.models(), "the worker to leave", within_s=LEAVE_S)
    _report(sheet, found, options.loras)
    sheet.figure("bringing a LoRA, two at a time", add_s, "{:.2f} s", key="add_s")


def _fill(running: Suite, folder: Path, count: int) -> list[int]:
    """Make LoRAs and bring them to the store; return their bytes there."""

    def bring(number: int) -> int:
        lora = random_lora(WEIGHTS, folder, seed=number, rank=RANKS[number % len(RANKS)])
        size_bytes = running.client.add_lora(f"lora{number}", lora.theirs).size_bytes
        lora.theirs.unlink()
        lora.ours.unlink()
        return size_bytes

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(bring, range(count)))


def _replay(running: Suite, requests: Sequence[tuple[int, ...]], budget_bytes: int, steps: int) -> Replayed:
    replayed, store = Replayed(), running.members["loras"]
    memory: dict[str, list[int]] = {"worker": [], "store": []}
    running.draw(PROMPT, seed=0, num_inference_steps=steps)
    before = metrics_of(store)
    for number, ranks in enumerate(requests):
        loras = [f"lora{rank}" for rank in ranks]
        _, seconds = running.draw(PROMPT, seed=number, num_inference_steps=steps, lora=loras)
        after = metrics_of(store)
        calls = calls_by_tier(before, after, len(ranks))
        replayed.calls += calls
        replayed.seconds[max(calls, key=TIERS.index)].append(seconds)
        replayed.held = max(replayed.held, after["bottega_lora_memory_bytes"] / budget_bytes)
        memory["worker"].append(_resident_bytes(running.members["worker"]))
        memory["store"].append(_resident_bytes(store))
        before = after
    for name, sizes in memory.items():
        settled = sizes[int(LEARNING * len(sizes)) :]
        replayed.growth_mib[name] = (max(settled) - settled[0]) / MIB
    return replayed


def calls_by_tier(before: Mapping[str, float], after: Mapping[str, float], asked: int) -> Counter[str]:
    """Return where a request's LoRAs came from, by the store's metrics before and after it.

    A LoRA that the store had in memory only because the gateway had told it of the request counts as of the disk.
    """

    def fetched(tier: str) -> int:
        name = f"bottega_lora_fetches_total:{tier}"
        return int(after.get(name, 0.0) - before.get(name, 0.0))

    memory, disk = fetched("memory"), fetched("loaded") + fetched("disk")
    return +Counter({"worker": asked - memory - disk, "memory": memory, "disk": disk})


def _resident_bytes(service: Service) -> int:
    process = psutil.Process(service.process.pid)
    return resident_bytes([process.pid, *(child.pid for child in process.children(recursive=True))])


def _report(sheet: Sheet, found: Mapping[tuple[str, float], Replayed], loras: int) -> None:
    for (name, share), replayed in found.items():
        key = f"{name.lower()}_{round(100 * share)}"
        shown = ", ".join(f"{tier} {replayed.share(tier):.2f}" for tier in TIERS)
        sheet.row(f"service {name}, room in the store for {share:.0%}: calls by tier", shown)
        what = "    of those that came to the store, in memory"
        sheet.figure(what, replayed.store_hits, key=f"store_hits_{key}")
        sheet.values[f"worker_hits_{key}"] = replayed.share("worker")
    for tier in TIERS:
        if ms := [1000 * each for replayed in found.values() for each in replayed.seconds[tier]]:
            p50, p95 = median(ms), percentile(ms, 0.95)
            sheet.row(f"latency, {tier}: median, p95, requests", f"{p50:.0f} ms, {p95:.0f} ms, {len(ms)}")
            sheet.values |= {f"latency_{tier}_ms": p50, f"p95_{tier}_ms": p95}
    held = max(replayed.held for replayed in found.values())
    what = "most LoRAs in the store's memory, of its budget"
    sheet.figure(what, held, "{:.3f}", key="held_of_budget", bar="at most 1")
    for name in ("worker", "store"):
        growth, bar = max(each.growth_mib[name] for each in found.values()), f"at most {GROWTH_MIB:g} MiB"
        sheet.figure(f"the {name} grew by", growth, "{:.1f} MiB", key=f"{name}_growth_mib", bar=bar)
    for trace in LORAS.values():
        what, key = f"of all calls of service {trace.name}, those to so many LoRAs", trace.name.lower()
        sheet.figure(what, trace.top_share(loras), key=f"top_share_{key}")


if __name__ == "__main__":
    sys.exit(BENCH.command())
