"""How many jobs a second the gateway acknowledges, each of them durable, and what sharing the disk's waits gains.

A real gateway process with a worker that takes nothing, so that nothing but acceptance is measured. Many callers that
each wait for their answer take turns with a single one, whose every job waits for an fsync of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import median

from bottega.rpc.channel import open_channel
from bottega.rpc.fleet import FleetMembership
from bottega.v1 import fleet_pb2, image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import SAMPLER_EULER, GenerationSpec
from load.bench.report import percentile, report
from tests.running import Services, gateway_config

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

Stubs = Sequence["image_pb2_grpc.ImageServiceAsyncStub"]


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--callers", type=int, default=256, help="callers at once")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round, for each side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary one")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is stopped
    with tempfile.TemporaryDirectory(prefix="bottega-bench-", dir=options.folder) as name:
        asyncio.run(_measure(options, Path(name)))


async def _measure(options: argparse.Namespace, folder: Path) -> None:
    fsync_ms = _fsync_ms(folder)
    many: list[list[float]] = []
    single: list[list[float]] = []
    with Services(folder) as services:
        config = gateway_config(max_queued=MANY, max_queued_bytes=1 << 40, max_jobs=MANY, codec_processes=1)
        gateway = services.start("bottega.gateway", config)
        async with _stubs(gateway.address) as stubs, _idle_worker(gateway.address):
            await _submit(stubs, callers=options.callers, seconds=1.0)
            for _ in range(options.rounds):
                many.append(await _submit(stubs, callers=options.callers, seconds=options.seconds))
                single.append(await _submit(stubs, callers=1, seconds=options.seconds))
    acks_per_s = median(len(waits) / options.seconds for waits in many)
    single_acks_per_s = median(len(waits) / options.seconds for waits in single)
    values = {
        "acks_per_s": acks_per_s,
        "ack_p99_ms": median(percentile(waits, 0.99) for waits in many) * 1e3,
        "single_acks_per_s": single_acks_per_s,
        "single_ack_p50_ms": median(median(waits) for waits in single) * 1e3,
        "group_commit_gain": acks_per_s / single_acks_per_s,
        "fsync_ms": fsync_ms,
        "callers": options.callers,
    }
    rows = [
        ("one fsync of this disk", f"{fsync_ms:.2f} ms", ""),
        (f"acknowledged, {options.callers} callers (acks_per_s)", f"{acks_per_s:.0f} a second", "hundreds"),
        ("  p99 of their waits (ack_p99_ms)", f"{values['ack_p99_ms']:.0f} ms", ""),
        ("acknowledged, one caller", f"{single_acks_per_s:.0f} a second", ""),
        ("many over one (group_commit_gain)", f"{values['group_commit_gain']:.2f}", "3 where an fsync takes 1 ms"),
    ]
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
        kind=fleet_pb2.SERVICE_KIND_WORKER, name="idle", address="127.0.0.1:9", version="bench", models=[MODEL]
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
