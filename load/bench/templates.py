"""What does an activation store with many templates take, edited as production's are?

Measured are its budgets and what each tier takes. The store is a process, and this one has a worker's link to it:
within the host, where sections are mapped, and then over TCP. Edits come one by one, of templates by InstGenIE's
popularity; one that the store does not have is recorded. That damage is found, tests/service/activations shows.

A run takes 10 minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
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
from bottega.addons.edits.engine.recordings.recording import RecordingKey, StepKey
from bottega.addons.edits.engine.recordings.source import MemoryActivations
from bottega.addons.edits.engine.recordings.step import MemoryStep
from bottega.addons.edits.wire import SectionLayout, messages
from bottega.addons.edits.wire.messages import WORKER_LIMITS, ActivationMessageKind
from bottega.addons.edits.wire.section import owner
from bottega.model.rows import Half
from bottega.transport import Deadline, Link, connect, kind_of
from bottega.v1.activations_pb2 import ListStoredTemplatesRequest, ListStoredTemplatesResponse, SectionInfo
from bottega.v1.activations_pb2_grpc import ActivationServiceStub
from load.bench.framework import Bench, Option, Sheet, percentile, seconds_of
from load.replay.trace_shape import TemplatePopularity
from tests.support.offers import ask_offer
from tests.support.running_activations import Recorded, ask, layout_of, request_section, send, send_section
from tests.support.services import FREE_PORTS, Services

# Of all templates' bytes.
MEMORY_SHARE, DISK_SHARE = 0.1, 0.6
# 1 MiB a section: of SDXL's, which have 200, the budget of one template keeps a part, in as many tensors.
ELEMENTS = 1 << 16
LAYOUT = SectionLayout.of((f"blocks.{number}", (1, ELEMENTS)) for number in range(8))
# Each has two sections.
STEPS = 2
TIERS = {
    "worker": "in the worker's memory",
    "memory": "in the store's memory, mapped",
    "tcp": "in the store's memory, over TCP",
    "disk": "on the disk",
}
_CALL_S = 30.0
_MIB = 1 << 20
BENCH = Bench(
    __file__,
    __doc__,
    Option("--templates", 500, "that are edited", smallest=20),
    Option("--edits", 4000, "within the host", smallest=40),
    Option("--tcp-edits", 400, "over TCP", smallest=20),
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
    total_bytes = templates * 2 * STEPS * LAYOUT.size_bytes
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


@contextmanager
def linked(address: str) -> Iterator[Link]:
    """Give a worker's link to the store at an address."""
    offer = ask_offer(address, kinds.ACTIVATIONS)
    with connect(offer.offer, Deadline.after(_CALL_S), limits=WORKER_LIMITS) as link:
        yield link


def replay(running: RunningStore, ranks: Iterator[int], edits: int, *, tcp: bool) -> Replayed:
    """Replay so many edits, one after the other."""
    replayed = Replayed()
    with linked(running.address) as link:
        for number, rank in enumerate(itertools.islice(ranks, edits)):
            _edit(link, Recorded(seed=rank, steps=STEPS, layout=LAYOUT, drawn=False), replayed, tcp=tcp)
            if number % 20 == 0:
                running.watch(replayed)
        running.watch(replayed)
    return replayed


def _edit(link: Link, template: Recorded, replayed: Replayed, *, tcp: bool) -> None:
    """Read all of a template, or record it."""
    answer = ask(link, template.question(would_record=True)).header
    if not answer.recording:
        replayed.edits["nowhere"] += 1
        if answer.record:
            replayed.record_s.append(seconds_of(lambda: _record(link, template)))
        return
    on_disk = False
    for place, section in enumerate(answer.sections):
        seconds = _fetch(link, section, layout_of(answer, place), template.key)
        on_disk = on_disk or not section.in_memory
        tier = ("tcp" if tcp else "memory") if section.in_memory else "disk"
        if not (tcp and tier == "disk"):  # over TCP the disk is the same one
            replayed.seconds[tier].append(seconds)
    replayed.edits["disk" if on_disk else "memory"] += 1


def _record(link: Link, template: Recorded) -> None:
    for place in range(len(template.keys)):
        send_section(link, template, place)
    send(link, messages.recording_message(template.header(), template.drawn_tensors()))


def _fetch(link: Link, section: SectionInfo, layout: SectionLayout, key: str) -> float:
    """Return the seconds until all of a section can be read here. Raises RuntimeError where it is another."""
    got = bytearray(layout.size_bytes)
    left = layout.tensor_bytes
    whole: memoryview | None = None
    began_s = time.perf_counter()
    request_section(link, section.digest, 1)
    while left:
        with link.recv(Deadline.after(_CALL_S)) as incoming:
            incoming.wait_all(Deadline.after(_CALL_S))
            if kind_of(incoming.layout) == ActivationMessageKind.WHOLE:
                whole, left = incoming.file, 0
            else:
                views = [incoming.view(index) for index in range(len(incoming.layout.specs))]
                _, chunk = messages.read_chunk(incoming.layout, views)
                first = layout.offsets[chunk.tensor] + chunk.start
                got[first : first + len(views[-1])] = views[-1]
                left -= len(views[-1])
    seconds = time.perf_counter() - began_s
    if whole is None:
        got[layout.size_bytes - len(owner(key)) :] = owner(key)
    if hashlib.sha256(got if whole is None else whole).hexdigest() != section.digest:
        raise RuntimeError(f"the section {section.digest} came as another")
    return seconds


def worker_seconds(rounds: int) -> list[float]:
    """Return the seconds to find a template in the worker's own memory, and all tensors of a section."""
    source = MemoryActivations(1 << 30)
    key = RecordingKey(model_hash="ab", dtype="float32", template="cd")
    begun = source.begin(key, (8, 8))
    assert begun is not None
    names = [tensor.name for tensor in LAYOUT.tensors]
    outputs = {name: torch.zeros(1, ELEMENTS, dtype=torch.float16) for name in names}
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
    """Replay within the host and over TCP."""
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
    section = f"a section of {LAYOUT.size_bytes / _MIB:.0f} MiB"
    for tier, label in TIERS.items():
        if ms := [1000 * seconds for seconds in host.seconds[tier]]:
            p50, p95 = median(ms), percentile(ms, 0.95)
            sheet.row(f"{section}, {label}: median, p95", f"{p50:.3f} ms, {p95:.3f} ms")
            sheet.values |= {f"{tier}_ms": p50, f"{tier}_p95_ms": p95}


if __name__ == "__main__":
    sys.exit(BENCH.command())
