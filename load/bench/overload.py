"""Ten times more requests than the suite can draw, for a minute, from callers that wait for nothing and retry nothing.

What is drawn must stay near the peak, those who are refused must know at once, memory must stay bounded, and
afterwards it must be as if nothing had been. Callers have deadlines, as callers do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from statistics import median

import grpc

from bottega.rpc.channel import open_channel
from bottega.v1.fleet_pb2 import ListMembersRequest
from bottega.v1.fleet_pb2_grpc import FleetServiceStub
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import CancelJobRequest, GenerateRequest
from bottega.v1.image_pb2_grpc import ImageServiceStub
from load.bench.report import percentile, report
from load.bench.scratch import scratch
from load.bench.suite import running_gateway
from load.replay.arrivals import poisson
from load.replay.driver import replay
from load.replay.results import Outcome, Result
from tests.support.services import Service

PROMPT = "a big red star on the left on a blue background"
STEPS = 30
TIMES = 10.0
# Enough that the worker always has as wide a group as it wants.
PEAK_CLIENTS = 16
# As long as a person waits.
DEADLINE_S = 20.0
# Memory is compared from here on: until then queues and pools fill.
SETTLED_S = 15.0
# A caller that is alone again: within so many times of what it took before.
NORMAL = 2.0
RECOVERY_S = 60.0
ARRIVALS_SEED = 5
MEMORY_INTERVAL_S = 1.0

# Of a request that was taken: its deadline passed, or it was dropped because it would.
_LATE = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass(slots=True, kw_only=True)
class Overload:
    """What came of the requests. ends_s: when those that were drawn were, after the start.

    rejected_s: how long each refusal at the door took. late: taken, and then not done in time. failed: anything else.
    memory: resident bytes of the gateway and of the worker, by time.
    """

    ends_s: list[float] = field(default_factory=list)
    rejected_s: list[float] = field(default_factory=list)
    late: int = 0
    failed: int = 0
    memory: list[tuple[float, int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request of the open loop."""

    at_s: float


class Refused(Exception):
    """At the door, after so many seconds."""

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
        """One request; the seconds that it took. Raises Refused, and grpc.aio.AioRpcError.

        Every second one comes as the SDK's do: its job is its own and would go on, so it says until when, and cancels.
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
        """Resident bytes of the gateway and of the worker."""
        members = (await self._fleet.ListMembers(ListMembersRequest(), timeout=DEADLINE_S)).members
        return members[0].load.memory_bytes, sum(member.load.memory_bytes for member in members[1:])


async def peak_per_s(callers: Callers, *, seconds: float) -> float:
    """Images per second while every client draws the next one as soon as it has the last."""
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
    """An open loop of so many requests a second. Raises RuntimeError where they did not go out so."""
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
    """Seconds from `ended_at` until a request takes about as long as it did alone."""
    while time.perf_counter() - ended_at < RECOVERY_S:
        with contextlib.suppress(grpc.aio.AioRpcError, Refused):
            if await callers.draw() <= NORMAL * alone_s:
                return time.perf_counter() - ended_at
        await asyncio.sleep(0.2)
    return RECOVERY_S


@contextlib.asynccontextmanager
async def _watched(callers: Callers, seen: Overload, began: float) -> AsyncIterator[None]:
    """Samples memory beside the block."""

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


async def measure(gateway: Service, options: argparse.Namespace) -> dict[str, float]:
    """Alone, at the peak, in overload, and afterwards."""
    async with open_channel(gateway.address) as channel, open_channel(gateway.fleet) as fleet:
        callers = Callers(channel, fleet)
        await peak_per_s(callers, seconds=options.seconds / 10)  # warms everything up
        alone_s = median([await callers.draw() for _ in range(5)])
        peak = await peak_per_s(callers, seconds=options.seconds / 2)
        began = time.perf_counter()
        seen = await overload(callers, rate_per_s=TIMES * peak, seconds=options.seconds)
        recovered_s = await recovery_s(callers, alone_s=alone_s, ended_at=began + options.seconds)
    return _values(seen, peak=peak, alone_s=alone_s, recovered_s=recovered_s, seconds=options.seconds)


def _values(seen: Overload, *, peak: float, alone_s: float, recovered_s: float, seconds: float) -> dict[str, float]:
    drawn = sum(end <= seconds for end in seen.ends_s)
    settled = [sample for sample in seen.memory if SETTLED_S <= sample[0] <= seconds]
    return {
        "goodput": drawn / seconds / peak,
        "reject_p99_ms": percentile(seen.rejected_s or [0.0], 0.99) * 1e3,
        "reject_p50_ms": percentile(seen.rejected_s or [0.0], 0.5) * 1e3,
        "recovered_s": recovered_s,
        "gateway_growth_mib": _growth_mib([sample[1] for sample in settled]),
        "worker_growth_mib": _growth_mib([sample[2] for sample in settled]),
        "peak_per_s": peak,
        "alone_s": alone_s,
        "drawn": len(seen.ends_s),
        "rejected": len(seen.rejected_s),
        "late": seen.late,
        "other_errors": seen.failed,
    }


def _growth_mib(sizes: list[int]) -> float:
    return (max(sizes) - sizes[0]) / 2**20 if sizes else 0.0


def main() -> None:
    """Measures and reports."""
    options = _options()
    with (
        scratch() as folder,
        running_gateway("miniature", options.threads, folder / "suite") as gateway,
    ):
        values = asyncio.run(measure(gateway, options))
    rows = [
        ("peak, 16 clients", f"{values['peak_per_s']:.1f} images/s", ""),
        ("drawn at ten times the peak, of it (goodput)", f"{values['goodput']:.2f}", "at least 0.9"),
        ("refused within, p99 (reject_p99_ms)", f"{values['reject_p99_ms']:.1f} ms", "at most 50 ms"),
        ("refused within, p50", f"{values['reject_p50_ms']:.1f} ms", ""),
        ("as before after (recovered_s)", f"{values['recovered_s']:.1f} s", "at most 30 s"),
        ("the gateway grew by", f"{values['gateway_growth_mib']:.1f} MiB", "at most 64 MiB"),
        ("the worker grew by", f"{values['worker_growth_mib']:.1f} MiB", "at most 64 MiB"),
        ("drawn, refused", f"{values['drawn']:.0f}, {values['rejected']:.0f}", ""),
        ("taken and then too late, other errors", f"{values['late']:.0f}, {values['other_errors']:.0f}", "few, 0"),
    ]
    report("overload", rows, {**values, "threads": options.threads})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    threads = max(1, (os.cpu_count() or 1) - 1)
    parser.add_argument("--threads", type=int, default=threads, help="of the engine; one core is for all others")
    return parser.parse_args()


if __name__ == "__main__":
    main()
