"""No callback of the worker's front uses more than 5 ms of CPU, whatever size of image passes through it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from PIL import Image

from bottega.rpc.channel import channel_options
from bottega.v1 import generation_pb2, worker_pb2, worker_pb2_grpc

HERE = Path(__file__).parent
MOST_MS = 5.0


@pytest.fixture
def front() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(HERE / "measured_front.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    ) as process:
        yield process
        process.kill()


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


def test_no_callback_of_the_front_uses_more_than_5_ms(front: subprocess.Popen[str]) -> None:
    assert front.stdin
    assert front.stdout
    address = front.stdout.readline().strip()
    large, usual = noise(1650), noise(1024)
    assert len(large) > 7.5 * 2**20
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        for number, (side, image) in enumerate([(64, None), (1024, usual), (1024, large), (2048, usual), (2048, None)]):
            draw(stub, f"job-{number}", side, image)
    front.stdin.close()
    measured = json.loads(front.stdout.readline())
    assert measured["calls"] > 500
    assert measured["costliest"][0][0] < MOST_MS, measured["costliest"]
