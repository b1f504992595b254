"""What a LoRA's way from a store's memory into a worker of the same host takes: shared, against sent in bytes.

A store and a worker in processes of their own; no gateway, no picture. The ways take turns, each has a new LoRA of 64
MiB in every round, and medians are compared. Every way ends with the worker's own check of the LoRA's hash.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from load.bench.report import report
from load.bench.scratch import scratch
from tests.support.shared_loras import LARGE, PATIENCE_S, SMALL, Shelf, Taker, canonical_file, shelf, taker

# What no link has: the store sends bytes to a worker that it has to keep to a pace, within its host, too.
_ANY_PACE = 1 << 50
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A store and its worker."""

    store: Shelf
    worker: Taker


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """ready_s: until the worker had all of it, checked. cpu_s: of both processes. own_bytes: that the worker took."""

    ready_s: float
    cpu_s: float
    own_bytes: int


def measure(folder: Path, rounds: int) -> tuple[dict[str, list[Fetched]], list[float]]:
    """What every way took, and the seconds that hashing a LoRA takes alone."""
    hash_s = []
    with ExitStack() as stack:
        ways = {
            "shared": stack.enter_context(_way(folder / "shared")),
            "slots": stack.enter_context(_way(folder / "slots", bytes_per_s=_ANY_PACE)),
            "tcp": stack.enter_context(_way(folder / "tcp", unix=False)),
        }
        fetched: dict[str, list[Fetched]] = {name: [] for name in ways}
        for number in range(rounds):
            lora = canonical_file(LARGE, seed=number)
            began_s = time.perf_counter()
            hashlib.sha256(lora).digest()
            hash_s.append(time.perf_counter() - began_s)
            for name, way in ways.items():
                fetched[name].append(_fetch(way, lora))
    return fetched, hash_s


@contextmanager
def _way(folder: Path, **options: Any) -> Iterator[Way]:
    folder.mkdir()
    with shelf(folder, **options) as store, taker() as worker:
        # Has the link opened, and threads and buffers made.
        worker.fetch(store.put(canonical_file(SMALL)), store.links.offer("w", "", caller=""))
        yield Way(store=store, worker=worker)


def _fetch(way: Way, lora: bytes) -> Fetched:
    """The store has it in memory, and the worker has never had it."""
    digest = way.store.put(lora)
    way.store.tiers.give_back(way.store.tiers.borrow(digest).result(PATIENCE_S))
    began_s = time.process_time()
    got = way.worker.fetch(digest)
    cpu_s = time.process_time() - began_s + got["cpu_s"]
    way.store.tiers.forget(digest)
    return Fetched(ready_s=got["ready_s"], cpu_s=cpu_s, own_bytes=got["own_bytes"])


def _report(fetched: Mapping[str, list[Fetched]], hash_s: list[float]) -> None:
    values = {"hash_ms": median(hash_s) * 1e3, "rounds": float(len(hash_s))}
    for name, of_way in fetched.items():
        values[f"{name}_ms"] = median(each.ready_s for each in of_way) * 1e3
        values[f"{name}_cpu_ms"] = median(each.cpu_s for each in of_way) * 1e3
        values[f"{name}_own_mib"] = median(each.own_bytes for each in of_way) / _MIB
    values["speedup"] = values["slots_ms"] / values["shared_ms"]
    rows = [
        ("the store's own memory (shared_ms)", f"{values['shared_ms']:.0f} ms", ""),
        ("  processor time of both ends (shared_cpu_ms)", f"{values['shared_cpu_ms']:.0f} ms", ""),
        ("  memory that the worker took (shared_own_mib)", f"{values['shared_own_mib']:.1f} MiB", "at most 1"),
        ("bytes in slots of a link within the host (slots_ms)", f"{values['slots_ms']:.0f} ms", ""),
        ("  processor time of both ends (slots_cpu_ms)", f"{values['slots_cpu_ms']:.0f} ms", ""),
        ("  memory that the worker took (slots_own_mib)", f"{values['slots_own_mib']:.1f} MiB", ""),
        ("bytes over TCP (tcp_ms)", f"{values['tcp_ms']:.0f} ms", ""),
        ("hashing alone, which every way ends with (hash_ms)", f"{values['hash_ms']:.0f} ms", ""),
        ("slots over shared (speedup)", f"{values['speedup']:.2f}", "above 1"),
    ]
    report("lora-way", rows, values)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(prog="make bench-lora-way", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="new LoRAs for every way (default: 9)")
    options = parser.parse_args()
    with scratch() as folder:
        fetched, hash_s = measure(folder, options.rounds)
    _report(fetched, hash_s)


if __name__ == "__main__":
    main()
