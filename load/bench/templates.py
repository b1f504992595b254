"""What does an activation store with many templates take, edited as production's are?

Measured are its budgets, what each tier takes, and damage. The store is a process, and this one has a worker's link to
it: within the host, where sections are mapped, and then over TCP. Edits come one by one, of templates by InstGenIE's
popularity; one that the store does not have is recorded. Then one bit of each of 10,000 sections is flipped on the
disk, and every one of them has to be refused.

A run takes 10 minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import sys
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
from bottega.activations.store.settings import ActivationStoreSettings, DropReason
from bottega.activations.store.store import ActivationStore
from bottega.addons.edits.engine.recordings.recording import RecordingKey, StepKey
from bottega.addons.edits.engine.recordings.source import MemoryActivations
from bottega.addons.edits.engine.recordings.step import MemoryStep
from bottega.errors import DataLoss
from bottega.model.rows import Half
from bottega.v1.activations_pb2 import ListStoredTemplatesRequest, ListStoredTemplatesResponse
from bottega.v1.activations_pb2_grpc import ActivationServiceStub
from load.bench.framework import Bench, Option, Sheet, percentile, seconds_of
from load.bench.template_client import TemplateClient, TemplateShape, key_of, layouts_of, question_of, recording_of
from load.replay.trace_shape import TemplatePopularity
from tests.support.services import FREE_PORTS, Services

# Of all templates' bytes.
MEMORY_SHARE, DISK_SHARE = 0.1, 0.6
# 1 MiB a section: of SDXL's, which have 200, the budget of one template keeps a part, in as many tensors.
SHAPE = TemplateShape(sections=4, tensors=8, elements=1 << 16)
# Their number is what counts.
DAMAGE_SHAPE = TemplateShape(sections=100, tensors=2, elements=1 << 12)
TIERS = {
    "worker": "in the worker's memory",
    "memory": "in the store's memory, mapped",
    "tcp": "in the store's memory, over TCP",
    "disk": "on the disk",
}
_CALL_S = 30.0
_MIB = 1 << 20
_ROOM = 1 << 40
# Too little for any section: each is read from the disk every time.
_NO_MEMORY = 1
_WAIT_S = 120.0
BENCH = Bench(
    __file__,
    __doc__,
    Option("--templates", 500, "that are edited", smallest=20),
    Option("--edits", 4000, "within the host", smallest=40),
    Option("--tcp-edits", 400, "over TCP", smallest=20),
    Option("--flips", 10_000, "of bits on the disk", smallest=10),
)


@dataclass(slots=True, kw_only=True)
class Replayed:
    """Edits that were replayed to a store."""

    edits: Counter[str] = field(default_factory=Counter)
    """By where the template was; sections of it may be in memory and on the disk."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    """Seconds of sections, by tier."""
    held_memory: float = 0.0
    """The most that the store had in memory, over its budget."""
    held_disk: float = 0.0
    """The most that the store had on the disk, over its budget."""
    disk_found: float = 0.0
    """The same by the files themselves."""
    record_s: list[float] = field(default_factory=list)
    """Seconds of recordings, for a worker that waits for nothing."""
    total: int = 0
    """Templates at the end."""


class RunningStore:
    """A store's process, and its folder."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self._folder = folder

    def watch(self, replayed: Replayed) -> None:
        """Look at what it holds, and drop its files from the system's cache, so that the disk is the disk."""
        with grpc.insecure_channel(self.address) as channel:
            stub: ActivationServiceStub = ActivationServiceStub(channel)
            held: ListStoredTemplatesResponse = stub.ListStoredTemplates(
                ListStoredTemplatesRequest(limit=1), timeout=_CALL_S
            )
        if held.trouble:
            raise RuntimeError(f"the store is in trouble: {held.trouble}")
        replayed.total = held.total
        replayed.held_memory = max(replayed.held_memory, held.memory_bytes / held.memory_budget_bytes)
        replayed.held_disk = max(replayed.held_disk, held.used_bytes / held.budget_bytes)
        found = sum(map(_dropped_from_cache, self._folder.rglob("*")))
        replayed.disk_found = max(replayed.disk_found, found / held.budget_bytes)


def _dropped_from_cache(path: Path) -> int:
    """Return the bytes of a section's file; 0 of anything else, and of one that has just gone."""
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
    """Run a store with budgets for a part of so many templates.

    Args:
        unix: Whether workers of its host share its memory.
    """
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
    """Replay so many edits, one after the other."""
    replayed = Replayed()
    with TemplateClient(running.address) as client:
        for number, rank in enumerate(itertools.islice(ranks, edits)):
            _edit(client, key_of(rank), replayed, tcp=tcp)
            if number % 20 == 0:
                running.watch(replayed)
        running.watch(replayed)
    return replayed


def _edit(client: TemplateClient, key: str, replayed: Replayed, *, tcp: bool) -> None:
    """Read all of a template, or record it."""
    answer = client.ask(key)
    if not answer.recording:
        replayed.edits["nowhere"] += 1
        if answer.record:
            replayed.record_s.append(seconds_of(lambda: client.record(key, SHAPE)))
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
    """Return the seconds to find a template in the worker's own memory, and all tensors of a section."""
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


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Replay within the host and over TCP, then flip bits."""
    logging.disable(logging.CRITICAL)  # the store logs each section that is damaged
    ranks = TemplatePopularity(count=options.templates).draw(random.Random(16))
    with store(folder / "suite", options.templates, unix=True) as running:
        host = replay(running, ranks, options.edits, tcp=False)
    with store(folder / "suite", options.templates, unix=False) as running:
        tcp = replay(running, ranks, options.tcp_edits, tcp=True)
    host.seconds["worker"] = worker_seconds(1000)
    host.seconds["tcp"] = tcp.seconds["tcp"]
    sheet.figure("templates in the store at the end", host.total, "{:.0f}", key="templates")
    edits = {where: host.edits[where] / host.edits.total() for where in ("memory", "disk", "nowhere")}
    sheet.row("edits: memory, disk, nowhere", ", ".join(f"{share:.2f}" for share in edits.values()))
    sheet.values |= {f"edits_{where}": share for where, share in edits.items()}
    for what, key, field_name in (
        ("most in memory, of the budget", "held_memory_of_budget", "held_memory"),
        ("most on the disk, of the budget", "held_disk_of_budget", "held_disk"),
        ("    by its files", "files_of_disk_budget", "disk_found"),
    ):
        most = max(getattr(each, field_name) for each in (host, tcp))
        sheet.figure(what, most, "{:.3f}", key=key, bar="at most 1")
    sheet.figure("recording a template", 1000 * median(host.record_s), "{:.1f} ms", key="record_ms")
    section = f"a section of {SHAPE.layout.size_bytes / _MIB:.0f} MiB"
    for tier, label in TIERS.items():
        if ms := [1000 * seconds for seconds in host.seconds[tier]]:
            p50, p95 = median(ms), percentile(ms, 0.95)
            sheet.row(f"{section}, {label}: median, p95", f"{p50:.3f} ms, {p95:.3f} ms")
            sheet.values |= {f"{tier}_ms": p50, f"{tier}_p95_ms": p95}
    damage = _flip_bits(folder / "damage", options.flips, DAMAGE_SHAPE)
    sheet.row("flipped bits that were found", f"{damage['found']} of {damage['flipped']}", "all")
    sheet.values |= damage


def _flip_bits(folder: Path, flips: int, shape: TemplateShape) -> dict[str, int]:
    """Record sections, flip one bit of each on the disk, and fetch it; return how many were flipped and refused.

    Half of them are fetched by a store that reads them into its memory, half by one that has none. From each store one
    section that is whole is fetched first. Raises RuntimeError where that is refused.
    """
    found = flipped = 0
    for number, memory_bytes in enumerate((_ROOM, _NO_MEMORY)):
        here = folder / str(number)
        digests = _recorded(here, flips // 2, shape)
        with _Opened(here, memory_bytes) as store:
            if not store.gives(digests[-1]):
                raise RuntimeError("a whole section is refused")
            files = {path.name: path for path in here.rglob("*") if len(path.name) == 64}
            chance = random.Random(number)
            for digest in digests[:-1]:
                _flip(files[digest], chance)
                flipped += 1
                found += not store.gives(digest)
    return {"flipped": flipped, "found": found}


def _recorded(folder: Path, count: int, shape: TemplateShape) -> list[str]:
    """Return the digests of so many sections, and of one more, in a folder that no store has open."""
    digests: list[str] = []
    with _Opened(folder, _ROOM) as store:
        number = 0
        while len(digests) <= count:
            digests += store.record(key_of(number), shape)
            number += 1
    return digests[: count + 1]


def _flip(path: Path, chance: random.Random) -> None:
    """Flip one bit, anywhere in the file."""
    mode = path.stat().st_mode
    path.chmod(mode | 0o200)
    with path.open("r+b") as file:
        place = chance.randrange(path.stat().st_size)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


class _Opened:
    """A store in this process."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._store = ActivationStore(
            ActivationStoreSettings(folder=folder, disk_budget_bytes=_ROOM, memory_budget_bytes=memory_bytes)
        )

    def __enter__(self) -> _Opened:
        self._store.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def record(self, key: str, shape: TemplateShape) -> list[str]:
        """Record a template; return its sections' digests."""
        store = self._store
        store.answer(question_of(key), self)
        for number, header in enumerate(shape.headers(key)):
            tensors = [memoryview(each) for each in shape.tensors_of(f"{key} {number}")]
            intake = store.begin_section(header, shape.layout, self)
            if isinstance(intake, DropReason):
                raise RuntimeError(f"the store does not take a section: {intake}")
            for place, tensor in enumerate(tensors):
                intake.write(place, 0, tensor)
        store.complete(recording_of(key), None, self)
        if not store.flush(_WAIT_S):
            raise RuntimeError("the store does not come to an end with a recording")
        answered = store.answer(question_of(key), self)
        if len(answered.header.sections) != shape.sections:
            raise RuntimeError("the store did not keep a recording")
        return [section.digest for section in answered.header.sections]

    def gives(self, digest: str) -> bool:
        """Return whether it hands the section out."""
        try:
            lease = self._store.fetch(digest).result(_WAIT_S)
        except DataLoss:
            return False
        self._store.give_back(lease)
        return True


if __name__ == "__main__":
    sys.exit(BENCH.command())
