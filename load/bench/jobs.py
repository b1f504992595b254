"""How many durable jobs a second does the gateway acknowledge, and what does sharing the disk's waits gain?

A real gateway process with a worker that takes nothing, so that nothing but acceptance is measured. Many callers, each
of which waits for its answer, take turns at two gateways: one that shares its commits, and one in which every job has a
commit, and so an fsync, of its own. The same again with a disk that is made slower, to what many disks are.

With `--store postgresql` the jobs are in a PostgreSQL server of its own, whose commits wait for the disk: the same with
one gateway and with two, whose callers are spread over both. The processor time of each process for a job says how many
jobs it could acknowledge with cores of its own, also where all share two. These figures are recorded as those of
jobs-postgresql.

`python -m load.bench.jobs --config FILE` is such a gateway: its environment gives the number of jobs that share a
commit and how much slower the disk is.

A run takes 1 minute on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from unittest.mock import patch

import psutil
import pytest

from bottega import kinds
from bottega.gateway.__main__ import main as gateway_main
from bottega.gateway.jobs.store import JobRecord, SqliteJobStore, sqlite_writer
from bottega.rpc.address import split_list
from bottega.rpc.channel import open_channel
from bottega.rpc.fleet_membership import FleetMembership
from bottega.storage import SerialTask
from bottega.v1 import fleet_pb2, image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import SAMPLER_EULER, GenerationSpec
from load.bench.framework import Bench, Option, Sheet, by_turns, percentile
from tests.support import s3
from tests.support.postgresql import PostgresServer, running_server
from tests.support.services import Service, Services, gateway_config

MODEL = image_pb2.Model(
    name="miniature",
    default_width=64,
    default_height=64,
    size_multiple=8,
    default_steps=30,
    default_guidance_scale=4.0,
    default_sampler=SAMPLER_EULER,
    vae_scale_factor=4,
)
# Nothing leaves the queue here.
MANY = 10_000_000
FSYNCS = 200
CHANNELS = 4
SHARED, ALONE = 256, 1
_GROUP, _SLOWER = "BENCH_MAX_GROUP", "BENCH_SLOWER_S"
_TRANSACT = sqlite_writer.GroupCommit._transact
BENCH = Bench(
    __file__,
    __doc__,
    Option("--callers", 256, "at once", smallest=4),
    Option("--seconds", 5.0, "of each round, for each side", smallest=0.2),
    Option("--rounds", 3, "of all sides", smallest=1),
    Option("--folder", None, "on the disk to measure; by default a temporary one", kind=Path),
    Option("--slow-fsync-ms", 1.0, "what an fsync takes on the slower disk"),
    Option("--store", "sqlite", "where jobs are", choices=("sqlite", "postgresql")),
    Option("--gateways", (1, 2), "that share the database of --store postgresql; 1 is what others are compared with"),
    inside="folder",
)

Stubs = Sequence["image_pb2_grpc.ImageServiceAsyncStub"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A gateway's way to commit."""

    max_group: int
    """Jobs that share a commit."""
    slower_s: float
    """Seconds that the disk takes longer for each commit."""

    @property
    def name(self) -> str:
        """Its name among the sides."""
        return f"{self.max_group}-{self.slower_s:g}"

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Change every job store of this process while the block runs."""

        def slowed(commit: sqlite_writer.GroupCommit, group: Sequence[SerialTask]) -> None:
            _TRANSACT(commit, group)
            time.sleep(self.slower_s)  # in WAL mode a commit waits for one fsync

        transact = slowed if self.slower_s else _TRANSACT
        shared = patch.object(sqlite_writer, "_MAX_GROUP", self.max_group)
        with shared, patch.object(sqlite_writer.GroupCommit, "_transact", transact):
            yield


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure all sides by turns, and the store alone."""
    if options.store == "postgresql":
        _measure_shared(options, folder, sheet)
        return
    fsync_ms = _fsync_ms(folder)
    slower_s = max(0.0, options.slow_fsync_ms - fsync_ms) / 1e3
    sides = dict.fromkeys(Side(max_group=n, slower_s=s) for s in (0.0, slower_s) for n in (SHARED, ALONE))
    waits = by_turns(
        {side.name: partial(_acknowledged, side, folder, options) for side in sides},
        options.rounds,
        warm_ups=0,
    )

    def rate(max_group: int, slower_s: float) -> float:
        rounds = waits[Side(max_group=max_group, slower_s=slower_s).name]
        return float(median(len(each) / options.seconds for each in rounds))

    disks = [("", 0.0, fsync_ms, "hundreds", "3 where an fsync takes 1 ms")]
    disks += [("slow_", slower_s, fsync_ms + slower_s * 1e3, "", "3")] if slower_s else []
    for name, slower, takes_ms, wanted, gain in disks:
        shared, alone = rate(SHARED, slower), rate(ALONE, slower)
        sheet.figure("one fsync", takes_ms, "{:.2f} ms", key=f"{name}fsync_ms")
        sheet.figure("  acknowledged", shared, "{:.0f} a second", key=f"{name}acks_per_s", bar=wanted)
        sheet.figure("  with a commit for each", alone, "{:.0f} a second", key=f"{name}alone_acks_per_s")
        sheet.figure("  gain", shared / alone, key=f"{name}group_commit_gain", bar=gain)
    stored = [_stored(Side(max_group=n, slower_s=0.0), folder, options) for n in (SHARED, ALONE)]
    sheet.figure("gain of the store alone", stored[0] / stored[1], "{:.1f}", key="store_gain")
    here = waits[Side(max_group=SHARED, slower_s=0.0).name]
    p99_ms = median(percentile(each, 0.99) for each in here) * 1e3
    sheet.figure("p99 of the waits", p99_ms, "{:.0f} ms", key="ack_p99_ms")
    sheet.values["callers"] = options.callers


def _measure_shared(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure numbers of gateways by turns, in new databases of one server."""
    sheet.bench = f"{sheet.bench}-postgresql"
    pictures = s3.started("nanio")  # gateways that share jobs have to share pictures, of which there are none here
    try:
        with running_server(durable=True) as server, pytest.MonkeyPatch.context() as environment:
            s3.set_environment(environment, pictures.url)
            shared = partial(_shared, server=server, objects=f"s3://{pictures.bucket()}")
            costs: dict[str, list[dict[str, float]]] = {str(number): [] for number in options.gateways}
            sides = {
                name: partial(shared, int(name), folder, options, costs=of_side) for name, of_side in costs.items()
            }
            waits = by_turns(sides, options.rounds, warm_ups=0)
    finally:
        pictures.end()
    rates = {name: float(median(len(each) / options.seconds for each in rounds)) for name, rounds in waits.items()}
    sheet.figure("one fsync", _fsync_ms(folder), "{:.2f} ms", key="fsync_ms")
    for name, rate in rates.items():
        many = "gateway" if name == "1" else "gateways"
        sheet.figure(f"acknowledged by {name} {many}", rate, "{:.0f} a second", key=f"acks_per_s_{name}")
        p99_ms = median(percentile(each, 0.99) for each in waits[name]) * 1e3
        sheet.figure("  p99 of the waits", p99_ms, "{:.0f} ms", key=f"ack_p99_ms_{name}")
        if name != "1" and "1" in rates:
            bar = "1.5 while PostgreSQL is not the limit" if name == "2" else ""
            sheet.figure("  of one gateway", rate / rates["1"], key=f"gateways_gain_{name}", bar=bar)
        for process in costs[name][0]:
            cost_ms = median(of_round[process] for of_round in costs[name])
            sheet.figure(f"  {process}'s processor time a job", cost_ms, "{:.2f} ms", key=f"{process}_ms_{name}")
        if name != "1" and "1" in rates:
            gain = sheet.values["scheduler_ms_1"] / sheet.values[f"scheduler_ms_{name}"]
            sheet.figure("  jobs for a core of the scheduler, of one gateway", gain, key=f"core_gain_{name}")
    sheet.values["callers"] = options.callers


def _shared(
    number: int,
    scratch: Path,
    options: argparse.Namespace,
    turn: int,
    *,
    server: PostgresServer,
    objects: str,
    costs: list[dict[str, float]],
) -> list[float]:
    """Return the seconds that each acknowledgement took, at gateways that share a new database.

    Args:
        costs: Gets the milliseconds of processor time a job, by process.
    """
    folder = scratch / f"{turn}-{number}-shared"
    folder.mkdir()
    url = server.url(server.new_database())
    with Services(folder) as services:
        gateways = [
            services.start(
                "gateway",
                _config(name=f"gateway-{place}", jobs=url, objects=objects, state=str(folder / f"state-{place}")),
            )
            for place in range(number)
        ]
        # The first one that starts is the scheduler.
        names = ["scheduler", *(f"follower {place}" if place > 1 else "follower" for place in range(1, number))]
        processes = dict(zip(names, (gateway.process.pid for gateway in gateways), strict=True))
        return asyncio.run(_called(gateways, options, processes | {"PostgreSQL": server.pid}, costs))


def _config(**settings: object) -> dict[str, object]:
    return gateway_config(max_queued=MANY, max_queued_bytes=1 << 40, max_jobs=MANY, codec_processes=1, **settings)


def _acknowledged(side: Side, scratch: Path, options: argparse.Namespace, turn: int) -> list[float]:
    """Return the seconds that each acknowledgement took, at a gateway of its own."""
    folder = scratch / f"{turn}-{side.name}"
    folder.mkdir()
    os.environ[_GROUP], os.environ[_SLOWER] = str(side.max_group), str(side.slower_s)
    with Services(folder) as services:
        return asyncio.run(_called([services.start("load.bench.jobs", _config())], options))


async def _called(
    gateways: Sequence[Service],
    options: argparse.Namespace,
    processes: Mapping[str, int] = MappingProxyType({}),
    costs: list[dict[str, float]] | None = None,
) -> list[float]:
    async with _stubs(gateways) as stubs, _idle_worker(",".join(gateway.fleet for gateway in gateways)):
        await _submit(stubs, callers=options.callers, seconds=min(1.0, options.seconds))
        before = {name: _processor_s(pid) for name, pid in processes.items()}
        waits = await _submit(stubs, callers=options.callers, seconds=options.seconds)
        if costs is not None:
            used_s = {name: _processor_s(pid) - before[name] for name, pid in processes.items()}
            costs.append({name: seconds / len(waits) * 1e3 for name, seconds in used_s.items()})
        return waits


def _processor_s(pid: int) -> float:
    """Return the processor time of a process and its children, in seconds."""
    main = psutil.Process(pid)
    times = [process.cpu_times() for process in (main, *main.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


async def _submit(stubs: Stubs, *, callers: int, seconds: float) -> list[float]:
    """Return the seconds that each acknowledgement took, of callers that submit one job after the other."""
    waits: list[float] = []
    until = time.perf_counter() + seconds

    async def call(number: int) -> None:
        stub = stubs[number % len(stubs)]
        request = image_pb2.SubmitJobRequest(spec=GenerationSpec(prompt="a big red star on a blue background", seed=1))
        while (began := time.perf_counter()) < until:
            await stub.SubmitJob(request, timeout=60)
            waits.append(time.perf_counter() - began)

    async with asyncio.TaskGroup() as group:
        for number in range(callers):
            group.create_task(call(number))
    return waits


def _stored(side: Side, folder: Path, options: argparse.Namespace) -> int:
    """Return the jobs that as many callers store in the time of a round, without the gateway around the job store."""

    async def run() -> int:
        store = SqliteJobStore(folder / f"store-{side.max_group}.sqlite")
        await store.open()
        stored = 0
        until = time.perf_counter() + options.seconds

        async def call(caller: int) -> None:
            nonlocal stored
            number = 0
            while time.perf_counter() < until:
                number += 1
                job_id = f"{caller:012x}{number:012x}"
                await store.add(JobRecord(job_id=job_id, fingerprint="", spec=bytes(200), created_wall=time.time()))
                stored += 1

        async with asyncio.TaskGroup() as group:
            for caller in range(options.callers):
                group.create_task(call(caller))
        await store.close()
        return stored

    with side.applied():
        return asyncio.run(run())


@contextlib.asynccontextmanager
async def _stubs(gateways: Sequence[Service]) -> AsyncIterator[Stubs]:
    async with contextlib.AsyncExitStack() as stack:
        opened = [open_channel(gateways[number % len(gateways)].address) for number in range(CHANNELS)]
        channels = [await stack.enter_async_context(channel) for channel in opened]
        stubs: Stubs = [image_pb2_grpc.ImageServiceStub(channel) for channel in channels]
        yield stubs


@contextlib.asynccontextmanager
async def _idle_worker(gateways: str) -> AsyncIterator[None]:
    """Join as a worker that is stopping: its model is served, and it is given nothing."""
    registration = fleet_pb2.Registration(
        kind=kinds.WORKER, name="idle", address="127.0.0.1:9", version="bench", models=[MODEL]
    )
    membership = FleetMembership(gateways, registration, load=lambda: fleet_pb2.Load(draining=True))
    membership.start()
    async with asyncio.timeout(10):
        while len(membership.gateways) < len(split_list(gateways)):  # noqa: ASYNC110 - each gateway joins by itself
            await asyncio.sleep(0.05)
    try:
        yield
    finally:
        await membership.stop()


def _fsync_ms(folder: Path) -> float:
    """Return the median milliseconds until 4 KiB more of a file are on the disk."""
    waits = []
    descriptor = os.open(folder / "fsync", os.O_WRONLY | os.O_CREAT)
    try:
        for _ in range(FSYNCS):
            began = time.perf_counter()
            os.write(descriptor, bytes(4096))
            os.fsync(descriptor)
            waits.append(time.perf_counter() - began)
    finally:
        os.close(descriptor)
    return median(waits) * 1e3


if __name__ == "__main__":
    if "--config" in sys.argv:
        with Side(max_group=int(os.environ[_GROUP]), slower_s=float(os.environ[_SLOWER])).applied():
            sys.exit(gateway_main())
    sys.exit(BENCH.command())
