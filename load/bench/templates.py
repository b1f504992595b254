"""An activation store with many templates, edited as production's are: its budgets, what each tier takes, and damage.

The store is a process, and this one has a worker's link to it: within the host, where sections are mapped, and then
over TCP. Edits come one by one, of templates by InstGenIE's popularity; one that the store does not have is recorded.
Then one bit of each of 10,000 sections is flipped on the disk, and every one of them has to be refused.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import grpc
import torch

from bottega import kinds
from bottega.addons.edits.engine.recordings.keys import RecordingKey, StepKey
from bottega.addons.edits.engine.recordings.memory import MemoryActivations
from bottega.addons.edits.engine.recordings.step import MemoryStep
from bottega.diffusion.rows import Half
from bottega.v1.activations_pb2 import ListStoredTemplatesRequest, ListStoredTemplatesResponse
from bottega.v1.activations_pb2_grpc import ActivationServiceStub
from load.bench.report import percentile, report
from load.bench.scratch import scratch
from load.bench.template_client import TemplateClient, TemplateShape, key_of, layouts_of
from load.bench.template_damage import flip_bits
from load.replay.template_popularity import TemplatePopularity
from tests.support.services import FREE_PORTS, Services

# Of all templates' bytes.
MEMORY_SHARE, DISK_SHARE = 0.1, 0.6
# 1 MiB a section: of SDXL's, which have 200, the budget of one template keeps a part, in as many tensors.
SHAPE = TemplateShape(sections=4, tensors=8, elements=1 << 16)
# Their number is what counts.
DAMAGE_SHAPE = TemplateShape(sections=100, tensors=2, elements=1 << 12)
TIERS = ("worker", "memory", "tcp", "disk")
_CALL_S = 30.0
_MIB = 1 << 20


@dataclass(slots=True, kw_only=True)
class Replayed:
    """edits: by where the template was; sections of it may be in memory and on the disk. seconds: of sections, by tier.

    held_memory, held_disk: the most that the store had, over its budgets; disk_found: the same of the files themselves.
    record_s: of recordings, as a worker that waits for nothing sees them. total: templates at the end.
    """

    edits: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    held_memory: float = 0.0
    held_disk: float = 0.0
    disk_found: float = 0.0
    record_s: list[float] = field(default_factory=list)
    total: int = 0


class RunningStore:
    """A store's process, and what its list says."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self._folder = folder

    def watch(self, replayed: Replayed) -> None:
        """What it holds now. What the system keeps of its files goes, so that the disk is the disk."""
        with grpc.insecure_channel(self.address) as channel:
            stub: ActivationServiceStub = ActivationServiceStub(channel)
            said: ListStoredTemplatesResponse = stub.ListStoredTemplates(
                ListStoredTemplatesRequest(limit=1), timeout=_CALL_S
            )
        if said.trouble:
            raise RuntimeError(f"the store is in trouble: {said.trouble}")
        replayed.total = said.total
        replayed.held_memory = max(replayed.held_memory, said.memory_bytes / said.memory_budget_bytes)
        replayed.held_disk = max(replayed.held_disk, said.used_bytes / said.budget_bytes)
        found = sum(map(_dropped_from_cache, self._folder.rglob("*")))
        replayed.disk_found = max(replayed.disk_found, found / said.budget_bytes)


def _dropped_from_cache(path: Path) -> int:
    """Bytes of a section's file; 0 of anything else, and of one that has just gone."""
    if len(path.name) != 64:
        return 0
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.fstat(file).st_size
    finally:
        os.close(file)


@contextmanager
def store(folder: Path, templates: int, *, unix: bool) -> Iterator[RunningStore]:
    """One with budgets for a part of so many templates. unix: whether workers of its host share its memory."""
    total_bytes = templates * SHAPE.size_bytes
    config = {
        "name": "activations",
        "gateway": "",
        "server": FREE_PORTS,
        "folder": str(folder / "store"),
        "budget_bytes": int(MEMORY_SHARE * total_bytes),
        "disk_bytes": int(DISK_SHARE * total_bytes),
        "min_free_bytes": 0,
        "template_mib": 0,
        "links": {} if unix else {"socket": None},
    }
    folder.mkdir(exist_ok=True)
    with Services(folder) as services:
        service = services.start(kinds.ACTIVATIONS, config, name="activations")
        yield RunningStore(service.address, folder / "store")


def replay(running: RunningStore, ranks: Iterator[int], edits: int, *, tcp: bool) -> Replayed:
    """So many edits, one after the other."""
    replayed = Replayed()
    with TemplateClient(running.address) as client:
        for number, rank in enumerate(itertools.islice(ranks, edits)):
            _edit(client, key_of(rank), replayed, tcp=tcp)
            if number % 20 == 0:
                running.watch(replayed)
        running.watch(replayed)
    return replayed


def _edit(client: TemplateClient, key: str, replayed: Replayed, *, tcp: bool) -> None:
    """Reads all of a template, or records it."""
    answer = client.ask(key)
    if not answer.recording:
        replayed.edits["nowhere"] += 1
        if answer.record:
            began_s = time.perf_counter()
            client.record(key, SHAPE)
            replayed.record_s.append(time.perf_counter() - began_s)
        return
    layouts = layouts_of(answer)
    on_disk = False
    for section in answer.sections:
        seconds = client.fetch(section, layouts[section.layout], key)
        on_disk = on_disk or not section.in_memory
        tier = ("tcp" if tcp else "memory") if section.in_memory else "disk"
        if not (tcp and tier == "disk"):  # over TCP the disk is the same one
            replayed.seconds[tier].append(seconds)
    replayed.edits["disk" if on_disk else "memory"] += 1


def worker_seconds(rounds: int) -> list[float]:
    """Of a section that is in the worker's own memory: to find its template, and all of its tensors."""
    source = MemoryActivations(1 << 30)
    key = RecordingKey(model_hash="ab", dtype="float32", template="cd")
    begun = source.begin(key, (8, 8))
    assert begun is not None
    names = [tensor.name for tensor in SHAPE.layout.tensors]
    outputs = {name: torch.zeros(1, SHAPE.elements, dtype=torch.float16) for name in names}
    step = StepKey(timestep=1.0, noise_level=1.0, half=Half.CONDITIONAL)
    begun.put(step, MemoryStep(valid=torch.ones(8, 8, dtype=torch.bool), outputs=outputs))
    source.complete(begun)
    seconds = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        found = source.find(key)
        assert found is not None
        got = [found.steps[step].get(name) for name in names]
        seconds.append(time.perf_counter() - began_s)
        assert all(each is not None for each in got)
        source.release(found)
    return seconds


def measure(folder: Path, options: argparse.Namespace) -> tuple[Replayed, Replayed, dict[str, int]]:
    """Within the host, over TCP, and what was found of damage."""
    popularity = TemplatePopularity(count=options.templates)
    ranks = popularity.draw(random.Random(16))
    with store(folder / "suite", options.templates, unix=True) as running:
        host = replay(running, ranks, options.edits, tcp=False)
    with store(folder / "suite", options.templates, unix=False) as running:
        tcp = replay(running, ranks, options.tcp_edits, tcp=True)
    host.seconds["worker"] = worker_seconds(1000)
    host.seconds["tcp"] = tcp.seconds["tcp"]
    return host, tcp, flip_bits(folder / "damage", options.flips, DAMAGE_SHAPE)


def values_of(host: Replayed, tcp: Replayed, damage: dict[str, int]) -> dict[str, float]:
    """What the line of JSON says."""
    values: dict[str, float] = {
        "templates": host.total,
        "held_memory_of_budget": max(host.held_memory, tcp.held_memory),
        "held_disk_of_budget": max(host.held_disk, tcp.held_disk),
        "files_of_disk_budget": max(host.disk_found, tcp.disk_found),
        "flipped": damage["flipped"],
        "found": damage["found"],
        "record_ms": 1000 * median(host.record_s),
    }
    for tier in TIERS:
        if seconds := host.seconds[tier]:
            values |= {f"{tier}_ms": 1000 * median(seconds), f"{tier}_p95_ms": 1000 * percentile(seconds, 0.95)}
    total = host.edits.total()
    return values | {f"edits_{where}": count / total for where, count in sorted(host.edits.items())}


def table_of(values: dict[str, float]) -> list[tuple[str, str, str]]:
    """What people read."""
    section = f"a section of {SHAPE.layout.size_bytes / _MIB:.0f} MiB"
    rows = [
        ("templates in the store at the end", f"{values['templates']:.0f}", ""),
        ("edits: memory, disk, nowhere", ", ".join(f"{values.get(f'edits_{at}', 0):.2f}" for at in _WHERE), ""),
        (
            "most in memory, of the budget (held_memory_of_budget)",
            f"{values['held_memory_of_budget']:.3f}",
            "at most 1",
        ),
        ("most on the disk, of the budget (held_disk_of_budget)", f"{values['held_disk_of_budget']:.3f}", "at most 1"),
        ("    by its files (files_of_disk_budget)", f"{values['files_of_disk_budget']:.3f}", "at most 1"),
        ("recording a template", f"{values['record_ms']:.1f} ms", ""),
    ]
    for tier in TIERS:
        if f"{tier}_ms" in values:
            said = f"{values[f'{tier}_ms']:.3f} ms, {values[f'{tier}_p95_ms']:.3f} ms"
            rows.append((f"{section}, {_SAID[tier]}: median, p95", said, ""))
    rows.append(("flipped bits that were found", f"{values['found']:.0f} of {values['flipped']:.0f}", "all"))
    return rows


_WHERE = ("memory", "disk", "nowhere")
_SAID = {
    "worker": "in the worker's memory",
    "memory": "in the store's memory, mapped",
    "tcp": "in the store's memory, over TCP",
    "disk": "on the disk",
}


def main() -> None:
    """Prints the table and the line of JSON."""
    parser = argparse.ArgumentParser(prog="make bench-templates", description=__doc__)
    parser.add_argument("--templates", type=int, default=500, help="that are edited (default: 500)")
    parser.add_argument("--edits", type=int, default=4000, help="within the host (default: 4000)")
    parser.add_argument("--tcp-edits", type=int, default=400, help="over TCP (default: 400)")
    parser.add_argument("--flips", type=int, default=10_000, help="of bits on the disk (default: 10000)")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # the store tells of each section that is damaged
    with scratch() as folder:
        values = values_of(*measure(folder, options))
    report("templates", table_of(values), values)


if __name__ == "__main__":
    main()
