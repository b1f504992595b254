"""What does a LoRA's way from a store's memory into a worker of the same host take: shared, against sent in bytes?

A store and a worker in processes of their own; no gateway, no picture. The ways take turns, each has a new LoRA of 64
MiB in every round, and medians are compared. Every way ends with the worker's own check of the LoRA's hash.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from load.bench.framework import Bench, Option, Sheet, by_turns, seconds_of
from tests.support.shared_loras import LARGE, PATIENCE_S, SMALL, Shelf, Taker, canonical_file, shelf, taker

# No link is so fast: within its host, too, the store sends bytes to a worker whose pace it has to keep.
_ANY_PACE = 1 << 50
_MIB = 1 << 20
BENCH = Bench(__file__, __doc__, Option("--rounds", 9, "new LoRAs for every way", smallest=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A LoRA that a worker has fetched."""

    ready_s: float
    """Seconds until the worker had all of it, checked."""
    cpu_s: float
    """Processor seconds of both processes."""
    own_bytes: int
    """Bytes that the worker took."""


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Fetch a new LoRA by every way in every round."""
    lora_of = functools.lru_cache(1)(lambda number: canonical_file(LARGE, seed=number))
    with ExitStack() as stack:
        ways = {
            "shared": stack.enter_context(_way(folder / "shared")),
            "slots": stack.enter_context(_way(folder / "slots", bytes_per_s=_ANY_PACE)),
            "tcp": stack.enter_context(_way(folder / "tcp", unix=False)),
        }
        fetched = by_turns(
            {name: functools.partial(_of_round, fetch, lora_of) for name, fetch in ways.items()},
            options.rounds,
            warm_ups=0,
        )
        hash_s = [seconds_of(lambda: hashlib.sha256(lora_of(0)).digest()) for _ in range(options.rounds)]
    labels = {
        "shared": "the store's own memory",
        "slots": "bytes in slots of a link within the host",
        "tcp": "bytes over TCP",
    }
    for name, of_way in fetched.items():
        sheet.figure(labels[name], median(each.ready_s for each in of_way) * 1e3, "{:.0f} ms", key=f"{name}_ms")
        cpu_ms, own_mib = (
            median(each.cpu_s for each in of_way) * 1e3,
            median(each.own_bytes for each in of_way) / _MIB,
        )
        sheet.figure("  processor time of both ends", cpu_ms, "{:.0f} ms", key=f"{name}_cpu_ms")
        bar = "at most 1" if name == "shared" else ""
        sheet.figure("  memory that the worker took", own_mib, "{:.1f} MiB", key=f"{name}_own_mib", bar=bar)
    what = "hashing alone, which every way ends with"
    sheet.figure(what, median(hash_s) * 1e3, "{:.0f} ms", key="hash_ms")
    speedup = sheet.values["slots_ms"] / sheet.values["shared_ms"]
    sheet.figure("slots over shared", speedup, key="speedup", bar="above 1")
    sheet.values["rounds"] = options.rounds


def _of_round(fetch: Callable[[bytes], Fetched], lora_of: Callable[[int], bytes], number: int) -> Fetched:
    return fetch(lora_of(number))


@contextmanager
def _way(folder: Path, **options: Any) -> Iterator[Callable[[bytes], Fetched]]:
    folder.mkdir()
    with shelf(folder, **options) as store, taker() as worker:
        # Opens the link, and makes threads and buffers.
        worker.fetch(store.put(canonical_file(SMALL)), store.links.offer("w", "", caller=""))
        yield functools.partial(_fetch, store, worker)


def _fetch(store: Shelf, worker: Taker, lora: bytes) -> Fetched:
    """Fetch a LoRA that the store has in memory, and the worker has never had."""
    digest = store.put(lora)
    store.tiers.give_back(store.tiers.borrow(digest).result(PATIENCE_S))
    began_s = time.process_time()
    got = worker.fetch(digest)
    cpu_s = time.process_time() - began_s + got["cpu_s"]
    store.tiers.forget(digest)
    return Fetched(ready_s=got["ready_s"], cpu_s=cpu_s, own_bytes=got["own_bytes"])


if __name__ == "__main__":
    sys.exit(BENCH.command())
