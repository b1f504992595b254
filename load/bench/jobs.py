"""How many jobs a second the gateway acknowledges, each of them durable, and what sharing the disk's waits gains.

A real gateway process with a worker that takes nothing, so that nothing but acceptance is measured. Many callers, each
of which waits for its answer, take turns at two gateways: one that shares its commits, and one in which every job has a
commit, and so an fsync, of its own. The same again with a disk that is made slower, to what many disks are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bottega import kinds
from bottega.gateway.jobs.store import JobRecord, SqliteJobStore
from bottega.rpc.channel import open_channel
from bottega.rpc.fleet_membership import FleetMembership
from bottega.v1 import fleet_pb2, image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import SAMPLER_EULER, GenerationSpec
from load.bench.jobs_gateway import GROUP_VARIABLE, SLOWER_VARIABLE, change
from load.bench.report import percentile, report
from load.bench.scratch import scratch
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

Stubs = Sequence["image_pb2_grpc.ImageServiceAsyncStub"]


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--callers", type=int, default=256, help="callers at once")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round, for each side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--slow-fsync-ms", type=float, default=1.0, help="what one takes on the slower disk")
    options = parser.parse_args()
    with scratch(options.folder) as folder:
        fsync_ms = _fsync_ms(folder)
        slower_s = max(0.0, options.slow_fsync_ms - fsync_ms) / 1e3
        sides = dict.fromkeys(Side(max_group=n, slower_s=s) for s in (0.0, slower_s) for n in (SHARED, ALONE))
        waits: dict[Side, list[list[float]]] = defaultdict(list)
        for turn in range(options.rounds):
            for side in sides:
                (folder / f"{turn}-{side}").mkdir()
                waits[side].append(_measure(side, folder / f"{turn}-{side}", options))
        store_gain = _store_gain(folder, options)
    _report(waits, slower_s, fsync_ms, store_gain, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What is compared. max_group: jobs that share a commit. slower_s: of the disk, for each commit."""

    max_group: int
    slower_s: float

    def __str__(self) -> str:
        return f"{self.max_group}-{self.slower_s:g}"


def _measure(side: Side, folder: Path, options: argparse.Namespace) -> list[float]:
    """Seconds that each acknowledgement took, at a gateway of its own."""
    os.environ[GROUP_VARIABLE], os.environ[SLOWER_VARIABLE] = str(side.max_group), str(side.slower_s)
    config = gateway_config(max_queued=MANY, max_queued_bytes=1 << 40, max_jobs=MANY, codec_processes=1)
    with Services(folder) as services:
        return asyncio.run(_called(services.start("load.bench.jobs_gateway", config), options))


async def _called(gateway: Service, options: argparse.Namespace) -> list[float]:
    async with _stubs(gateway.address) as stubs, _idle_worker(gateway.fleet):
        await _submit(stubs, callers=options.callers, seconds=1.0)
        return await _submit(stubs, callers=options.callers, seconds=options.seconds)


def _store_gain(folder: Path, options: argparse.Namespace) -> float:
    """The same of the job store without the gateway around it, whose work for every call is what is left."""
    rates = []
    for max_group in (SHARED, ALONE):
        change(max_group, 0.0)
        rates.append(asyncio.run(_stored(folder / f"store-{max_group}.sqlite", options)))
    return rates[0] / rates[1]


async def _stored(path: Path, options: argparse.Namespace) -> int:
    """Jobs that as many callers have stored in the time of a round."""
    store = SqliteJobStore(path)
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


def _report(
    waits: dict[Side, list[list[float]]],
    slower_s: float,
    fsync_ms: float,
    store_gain: float,
    options: argparse.Namespace,
) -> None:
    def rate(max_group: int, slower_s: float) -> float:
        rounds = waits[Side(max_group=max_group, slower_s=slower_s)]
        return float(median(len(each) / options.seconds for each in rounds))

    here = waits[Side(max_group=SHARED, slower_s=0.0)]
    values = {
        "acks_per_s": rate(SHARED, 0.0),
        "ack_p99_ms": median(percentile(each, 0.99) for each in here) * 1e3,
        "alone_acks_per_s": rate(ALONE, 0.0),
        "group_commit_gain": rate(SHARED, 0.0) / rate(ALONE, 0.0),
        "fsync_ms": fsync_ms,
        "slow_acks_per_s": rate(SHARED, slower_s),
        "slow_alone_acks_per_s": rate(ALONE, slower_s),
        "slow_group_commit_gain": rate(SHARED, slower_s) / rate(ALONE, slower_s),
        "slow_fsync_ms": fsync_ms + slower_s * 1e3,
        "store_gain": store_gain,
        "callers": options.callers,
    }
    rows = []
    here_only = [("", "hundreds", "3 where an fsync takes 1 ms")]
    for name, wanted, gain in here_only if not slower_s else [*here_only, ("slow_", "", "3")]:
        rows += [
            (f"one fsync ({name}fsync_ms)", f"{values[f'{name}fsync_ms']:.2f} ms", ""),
            (f"  acknowledged ({name}acks_per_s)", f"{values[f'{name}acks_per_s']:.0f} a second", wanted),
            ("  with a commit for each", f"{values[f'{name}alone_acks_per_s']:.0f} a second", ""),
            (f"  gain ({name}group_commit_gain)", f"{values[f'{name}group_commit_gain']:.2f}", gain),
        ]
    rows.append(("gain of the store alone (store_gain)", f"{store_gain:.1f}", ""))
    rows.append(("p99 of the waits (ack_p99_ms)", f"{values['ack_p99_ms']:.0f} ms", ""))
    report("jobs", rows, values)


async def _submit(stubs: Stubs, *, callers: int, seconds: float) -> list[float]:
    """Seconds that each acknowledgement took, of callers that submit one job after the other."""
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


@contextlib.asynccontextmanager
async def _stubs(address: str) -> AsyncIterator[Stubs]:
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel(address)) for _ in range(CHANNELS)]
        stubs: Stubs = [image_pb2_grpc.ImageServiceStub(channel) for channel in channels]
        yield stubs


@contextlib.asynccontextmanager
async def _idle_worker(gateway: str) -> AsyncIterator[None]:
    """A worker that says that it is stopping: its model is served, and it is given nothing."""
    registration = fleet_pb2.Registration(
        kind=kinds.WORKER, name="idle", address="127.0.0.1:9", version="bench", models=[MODEL]
    )
    membership = FleetMembership(gateway, registration, load=lambda: fleet_pb2.Load(draining=True))
    membership.start()
    await asyncio.wait_for(membership.joined.wait(), 10)
    try:
        yield
    finally:
        await membership.stop()


def _fsync_ms(folder: Path) -> float:
    """Median milliseconds until 4 KiB more of a file are on the disk."""
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
    main()
