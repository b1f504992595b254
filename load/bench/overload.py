"""What is left at ten times more requests than the suite can draw, for a minute, from callers that retry nothing?

What is drawn must stay near the peak, refusals must come at once, memory must stay bounded, and afterwards everything
must be as before. Callers have deadlines, as real ones do.

A run takes 3 minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import grpc

from bottega.rpc.channel import open_channel
from bottega.v1.fleet_pb2 import ListMembersRequest
from bottega.v1.fleet_pb2_grpc import FleetServiceStub
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import CancelJobRequest, GenerateRequest
from bottega.v1.image_pb2_grpc import ImageServiceStub
from load.bench.framework import CORES, PROMPT, Bench, Option, Sheet, percentile
from load.bench.suites import plain_suite
from load.replay.arrivals import poisson
from load.replay.driver import replay
from load.replay.results import Outcome, Result
from tests.support.services import Service

STEPS = 30
TIMES = 10.0
# Enough that the worker always has as wide a group as it wants.
PEAK_CLIENTS = 16
# As long as a person waits.
DEADLINE_S = 20.0
# Memory is compared from then on: before that, queues and pools fill.
SETTLED_S = 15.0
# A caller that is alone again takes at most so many times as long as before.
NORMAL = 2.0
RECOVERY_S = 60.0
ARRIVALS_SEED = 5
MEMORY_INTERVAL_S = 1.0
BENCH = Bench(
    __file__,
    __doc__,
    Option("--seconds", 60.0, "of overload", smallest=2.0),
    Option("--threads", max(1, CORES - 1), "of the engine; one core is for everything else"),
)

# Statuses of an accepted request whose deadline passed, or that was dropped because it would.
_LATE = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass(slots=True, kw_only=True)
class Overload:
    """The requests of an overload."""

    ends_s: list[float] = field(default_factory=list)
    """Times, from the start, at which requests were drawn."""
    rejected_s: list[float] = field(default_factory=list)
    """Seconds that each refusal took."""
    late: int = 0
    """Requests that were accepted and then not done in time."""
    failed: int = 0
    """Requests that ended otherwise."""
    memory: list[tuple[float, int, int]] = field(default_factory=list)
    """Time, and resident bytes of the gateway and of the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request of the open loop."""

    at_s: float


class Refused(Exception):
    """A request was refused before it was accepted."""

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self.after_s = after_s


class Callers:
    """Callers of one gateway, each with a request of its own."""

    def __init__(self, channel: grpc.aio.Channel, fleet: grpc.aio.Channel) -> None:
        self._images = ImageServiceStub(channel)
        self._fleet = FleetServiceStub(fleet)
        self._seeds = itertools.count()

    async def draw(self, *, timeout_s: float = DEADLINE_S) -> float:
        """Draw one request; return its seconds. Raises Refused, and grpc.aio.AioRpcError.

        Every second one comes as the SDK's do: its job would go on by itself, so it has a deadline, and is cancelled.
        """
        seed = next(self._seeds)
        request = GenerateRequest(spec=GenerationSpec(prompt=PROMPT, seed=seed, num_inference_steps=STEPS))
        if seed % 2:
            request.request_id, request.deadline_s = uuid.uuid4().hex, timeout_s
        began, job_id = time.perf_counter(), ""
        try:
            async for answer in self._images.Generate(request, timeout=timeout_s):
                job_id = answer.event.job_id
        except grpc.aio.AioRpcError as error:
            if not job_id and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Refused(time.perf_counter() - began) from None
            if job_id and request.request_id:
                await self._images.CancelJob(CancelJobRequest(job_id=job_id), timeout=DEADLINE_S)
            raise
        return time.perf_counter() - began

    async def memory(self) -> tuple[int, int]:
        """Return resident bytes of the gateway and of the worker."""
        members = (await self._fleet.ListMembers(ListMembersRequest(), timeout=DEADLINE_S)).members
        return members[0].load.memory_bytes, sum(member.load.memory_bytes for member in members[1:])


async def peak_per_s(callers: Callers, *, seconds: float) -> float:
    """Return images per second while every client draws the next one as soon as it has the last."""
    drawn = 0
    until = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal drawn
        while time.perf_counter() < until:
            await callers.draw(timeout_s=10 * DEADLINE_S)
            drawn += time.perf_counter() < until

    await asyncio.gather(*(client() for _ in range(PEAK_CLIENTS)))
    return drawn / seconds


async def overload(callers: Callers, *, rate_per_s: float, seconds: float) -> Overload:
    """Send so many requests a second in an open loop. Raises RuntimeError where they did not go out at that rate."""
    seen = Overload()
    times = poisson(rate_per_s, int(rate_per_s * seconds), random.Random(ARRIVALS_SEED))
    plan = [Call(at_s=at_s) for at_s in times]
    began = time.perf_counter()

    async def send(_: Call) -> Result:
        try:
            await callers.draw()
        except Refused as refused:
            seen.rejected_s.append(refused.after_s)
            return Result(outcome=Outcome.REFUSED)
        except grpc.aio.AioRpcError as error:
            outcome = Outcome.LATE if error.code() in _LATE else Outcome.FAILED
            return Result(outcome=outcome, reason=error.code().name)
        seen.ends_s.append(time.perf_counter() - began)
        return Result()

    async with _watched(callers, seen, began):
        # Callers have deadlines of their own; the driver has one only so that nothing waits for ever.
        run = await replay(plan, send, deadline_s=3 * DEADLINE_S, max_in_flight=len(plan))
    if run.void:
        raise RuntimeError(run.void)
    seen.late, seen.failed = run.outcomes[Outcome.LATE], run.outcomes[Outcome.FAILED]
    return seen


async def recovery_s(callers: Callers, *, alone_s: float, ended_at: float) -> float:
    """Return the seconds from `ended_at` until a request takes about as long as it did alone."""
    while time.perf_counter() - ended_at < RECOVERY_S:
        with contextlib.suppress(grpc.aio.AioRpcError, Refused):
            if await callers.draw() <= NORMAL * alone_s:
                return time.perf_counter() - ended_at
        await asyncio.sleep(0.2)
    return RECOVERY_S


@contextlib.asynccontextmanager
async def _watched(callers: Callers, seen: Overload, began: float) -> AsyncIterator[None]:
    """Sample memory while the block runs."""

    async def sample() -> None:
        while True:
            seen.memory.append((time.perf_counter() - began, *await callers.memory()))
            await asyncio.sleep(MEMORY_INTERVAL_S)

    sampling = asyncio.create_task(sample())
    try:
        yield
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Start the suite, and measure."""
    with plain_suite("miniature", options.threads, folder / "suite") as gateway:
        seen = asyncio.run(_measure(gateway, options.seconds, sheet))
    drawn = sum(end <= options.seconds for end in seen.ends_s)
    settled = [sample for sample in seen.memory if SETTLED_S <= sample[0] <= options.seconds]
    reject_ms = [1e3 * seconds for seconds in seen.rejected_s or [0.0]]
    goodput = drawn / options.seconds / sheet.values["peak_per_s"]
    sheet.figure("drawn at ten times the peak, of it", goodput, key="goodput", bar="at least 0.9")
    p99, bar = percentile(reject_ms, 0.99), "at most 50 ms"
    sheet.figure("refused within, p99", p99, "{:.1f} ms", key="reject_p99_ms", bar=bar)
    sheet.figure("refused within, p50", percentile(reject_ms, 0.5), "{:.1f} ms", key="reject_p50_ms")
    recovered, bar = sheet.values["recovered_s"], "at most 30 s"
    sheet.figure("as before after", recovered, "{:.1f} s", key="recovered_s", bar=bar)
    for place, name in enumerate(("gateway", "worker"), start=1):
        sizes = [sample[place] for sample in settled]
        growth, bar = (max(sizes) - sizes[0]) / 2**20 if sizes else 0.0, "at most 64 MiB"
        sheet.figure(f"the {name} grew by", growth, "{:.1f} MiB", key=f"{name}_growth_mib", bar=bar)
    sheet.row("drawn, refused", f"{len(seen.ends_s)}, {len(seen.rejected_s)}")
    sheet.row("taken and then too late, other errors", f"{seen.late}, {seen.failed}", "few, 0")
    counts = {
        "drawn": len(seen.ends_s),
        "rejected": len(seen.rejected_s),
        "late": seen.late,
        "other_errors": seen.failed,
    }
    sheet.values |= {**counts, "threads": options.threads}


async def _measure(gateway: Service, seconds: float, sheet: Sheet) -> Overload:
    """Measure alone, at the peak, in overload, and afterwards."""
    async with open_channel(gateway.address) as channel, open_channel(gateway.fleet) as fleet:
        callers = Callers(channel, fleet)
        await peak_per_s(callers, seconds=seconds / 10)  # warms everything up
        alone_s = median([await callers.draw() for _ in range(5)])
        peak = await peak_per_s(callers, seconds=seconds / 2)
        began = time.perf_counter()
        seen = await overload(callers, rate_per_s=TIMES * peak, seconds=seconds)
        recovered_s = await recovery_s(callers, alone_s=alone_s, ended_at=began + seconds)
    sheet.figure("peak, 16 clients", peak, "{:.1f} images/s", key="peak_per_s")
    sheet.values |= {"alone_s": alone_s, "recovered_s": recovered_s}
    return seen


if __name__ == "__main__":
    sys.exit(BENCH.command())
