"""What a worker makes of a RunAttemptRequest."""

from __future__ import annotations

import math
from typing import Any

import psutil
import pytest

from bottega.errors import InvalidRequest
from bottega.v1 import generation_pb2, worker_pb2
from bottega.worker.service import read_attempt

IMAGE_BYTES = 8 << 20
HOSTS = {"controlnet": b"who hosts it"}

FULL: dict[str, Any] = {
    "prompt": "a star",
    "num_inference_steps": 6,
    "guidance_scale": 4.0,
    "width": 64,
    "height": 64,
    "seed": 7,
    "num_images": 1,
}


def _raw(spec: generation_pb2.GenerationSpec, **fields: Any) -> bytes:
    fields = {"attempt": worker_pb2.AttemptId(job_id="job", number=2)} | fields
    return worker_pb2.RunAttemptRequest(spec=spec, **fields).SerializeToString()


def _raw_with_images() -> bytes:
    controlnets = [generation_pb2.ControlNet(name="edges", image=b"x")]
    spec = generation_pb2.GenerationSpec(**FULL, image=bytes(IMAGE_BYTES), strength=0.5, controlnets=controlnets)
    return _raw(spec, request_id="r", deadline_s=3, addons=HOSTS)


def test_the_images_stand_beside_the_spec() -> None:
    request, inputs = read_attempt(_raw_with_images())
    assert inputs.size_bytes(request.spec) == 2 * 3 * 64 * 64  # source and control image, decoded
    assert request.addons == HOSTS
    controlnets = [generation_pb2.ControlNet(name="edges")]
    assert request.spec == generation_pb2.GenerationSpec(**FULL, strength=0.5, controlnets=controlnets)
    assert (request.attempt.job_id, request.attempt.number) == ("job", 2)
    assert (request.request_id, request.deadline_s) == ("r", 3)


def test_a_request_whose_image_was_let_go_keeps_none_of_its_memory() -> None:
    raw = _raw_with_images()
    process = psutil.Process()
    before = process.memory_info().rss
    kept = [read_attempt(raw)[0] for _ in range(10)]
    assert process.memory_info().rss - before < 3 * IMAGE_BYTES
    assert len(kept) == 10


def test_a_controlnet_needs_an_image() -> None:
    nets = [generation_pb2.ControlNet(name="edges")]
    with pytest.raises(InvalidRequest) as refusal:
        read_attempt(_raw(generation_pb2.GenerationSpec(**FULL, controlnets=nets)))
    assert [violation.field for violation in refusal.value.violations] == ["spec.controlnets[0].image"]


def test_all_that_is_wrong_is_said_at_once() -> None:
    spec = generation_pb2.GenerationSpec(**(FULL | {"width": 0, "sampler": 99}))
    with pytest.raises(InvalidRequest) as refusal:
        read_attempt(_raw(spec, attempt=worker_pb2.AttemptId(), deadline_s=math.nan))
    fields = {violation.field for violation in refusal.value.violations}
    assert fields == {"attempt.job_id", "attempt.number", "spec.width", "spec.sampler", "deadline_s"}
