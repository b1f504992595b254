"""What a worker makes of a RunAttemptRequest."""

from __future__ import annotations

import dataclasses

import psutil

from bottega.v1 import generation_pb2, worker_pb2
from bottega.worker.service import order_from

IMAGE_BYTES = 8 << 20


def _raw() -> bytes:
    spec = generation_pb2.GenerationSpec(
        prompt="a star",
        image=bytes(IMAGE_BYTES),
        strength=0.5,
        controlnets=[generation_pb2.ControlNet(name="edges", image=b"x")],
    )
    attempt = worker_pb2.AttemptId(job_id="job", number=2)
    return worker_pb2.RunAttemptRequest(attempt=attempt, spec=spec, request_id="r", deadline_s=3).SerializeToString()


def test_the_image_stands_beside_the_spec() -> None:
    order = order_from(_raw())
    assert len(order.image) == IMAGE_BYTES
    controlnets = [generation_pb2.ControlNet(name="edges")]
    assert order.spec == generation_pb2.GenerationSpec(prompt="a star", strength=0.5, controlnets=controlnets)
    assert (order.key.job_id, order.key.number, order.request_id, order.deadline_s) == ("job", 2, "r", 3)


def test_an_order_whose_image_was_let_go_keeps_none_of_its_memory() -> None:
    raw = _raw()
    process = psutil.Process()
    before = process.memory_info().rss
    kept = [dataclasses.replace(order_from(raw), image=b"") for _ in range(10)]
    assert process.memory_info().rss - before < 3 * IMAGE_BYTES
    assert len(kept) == 10
