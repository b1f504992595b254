"""No callback of the worker's front uses more than 5 ms of CPU, whatever size of image passes through it and however
many attempts it carries, while it stays in a fleet.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from bottega.rpc.channel import channel_options
from bottega.v1 import generation_pb2, worker_pb2, worker_pb2_grpc
from tests.fakes.scripted_gateway import ScriptedGateway, serving
from tests.support.processor_speed import on_this_machine

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[3]
MOST_MS = 5.0
LARGE_BYTES = int(7.5 * 2**20)
CALLERS = 48
# On busy cores of a virtual machine about one callback a second is charged 3 to 20 ms of system time in which it did
# nothing (measured; even getpid is). What the front does too slowly it does for each of many attempts, and whenever it
# is asked again.
HITCHES = 2
# Until one is without others: what the front does too slowly it does in every one.
ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """A measured front that has joined `gateway`."""

    process: subprocess.Popen[str]
    gateway: ScriptedGateway
    stub: worker_pb2_grpc.WorkerServiceStub
    metrics: str

    def measured(self) -> dict[str, Any]:
        """Ends it; what it has measured."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        measured: dict[str, Any] = json.loads(self.process.stdout.readline())
        return measured


@contextlib.contextmanager
def measured_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.measured_front", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def running_front() -> Iterator[Front]:
    gateway = ScriptedGateway()
    with serving(gateway) as address, measured_process(address) as process:
        assert process.stdout
        own, metrics = process.stdout.readline().split()
        with grpc.insecure_channel(own, options=channel_options()) as channel:
            yield Front(
                process=process, gateway=gateway, stub=worker_pb2_grpc.WorkerServiceStub(channel), metrics=metrics
            )


def bare_grpc_ms(size_bytes: int) -> float:
    """Return the costliest callback of a bare gRPC server that receives messages of a size, CPU milliseconds."""
    with measured_process() as process:
        assert process.stdin
        assert process.stdout
        address, _ = process.stdout.readline().split()
        with grpc.insecure_channel(address, options=channel_options()) as channel:
            call: Any = channel.unary_unary("/bare/Forget")
            for _ in range(3):
                call(bytes(size_bytes), timeout=20)
        process.stdin.close()
        costliest: float = json.loads(process.stdout.readline())["costliest"][0][0]
        return costliest


def noise(side: int) -> bytes:
    """A PNG that does not compress: 3 bytes a pixel."""
    out = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    return out.getvalue()


def draw(stub: worker_pb2_grpc.WorkerServiceStub, job_id: str, side: int, image: bytes | None) -> None:
    spec = generation_pb2.GenerationSpec(
        prompt="flat",
        num_inference_steps=20,
        guidance_scale=4.0,
        width=side,
        height=side,
        seed=1,
        num_images=2,
        image=image,
        strength=None if image is None else 0.6,
    )
    attempt = worker_pb2.AttemptId(job_id=job_id, number=1)
    request = worker_pb2.RunAttemptRequest(
        attempt=attempt,
        spec=spec,
        checkpoint=b"0",
        preview=True,
    )
    events = list(stub.RunAttempt(request, timeout=60))
    assert events[-1].WhichOneof("event") == "completed"
    assert sum(event.image.last for event in events) == 2


def images_of_any_size(front: Front) -> list[Any]:
    """The costliest callbacks, CPU milliseconds first."""
    large, usual = noise(1650), noise(1024)
    assert len(large) > LARGE_BYTES
    for number, (side, image) in enumerate([(64, None), (1024, usual), (1024, large), (2048, usual), (2048, None)]):
        draw(front.stub, f"job-{number}", side, image)
    measured = front.measured()
    assert measured["calls"] > 500
    return list(measured["costliest"])


def many_attempts(front: Front) -> list[Any]:
    """The costliest callbacks but for hitches, CPU milliseconds first."""
    small = noise(256)
    drawn = threading.Event()
    with ThreadPoolExecutor(CALLERS + 1) as callers:
        scraped = callers.submit(scrape_until, drawn, front.metrics)
        jobs = [
            callers.submit(draw, front.stub, f"job-{number}", 256, small if number % 2 else None)
            for number in range(2 * CALLERS)
        ]
        wait(jobs)
        drawn.set()
        for job in jobs:
            job.result()
        assert scraped.result() > 5
    measured = front.measured()
    assert max(len(report.running) for report in front.gateway.reports) > CALLERS // 2
    return list(measured["costliest"][HITCHES:])


@pytest.mark.parametrize("load", [images_of_any_size, many_attempts])
def test_no_callback_of_the_front_uses_more_than_5_ms(load: Callable[[Front], list[Any]]) -> None:
    """Nor, on a machine where gRPC itself takes longer than that to receive the largest image, a fifth more than it."""
    seen = []
    for _ in range(ROUNDS):
        with running_front() as front:
            costliest = load(front)
        bound_ms = on_this_machine(MOST_MS)
        if costliest[0][0] < bound_ms:
            return
        bound_ms = max(bound_ms, 1.2 * bare_grpc_ms(LARGE_BYTES))
        if costliest[0][0] < bound_ms:
            return
        seen.append((bound_ms, costliest[:3]))
    pytest.fail(f"in each of {ROUNDS} rounds a callback took longer: {seen}")


def scrape_until(ended: threading.Event, metrics: str) -> int:
    """As Prometheus does, only more often; how often."""
    count = 0
    while not ended.wait(0.1):
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as answer:
            assert b"bottega_worker_running" in answer.read()
        count += 1
    return count
