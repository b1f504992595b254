"""What operators rely on, of services as they really run: logs, and what the fleet counts."""

from __future__ import annotations

from typing import Any

from bottega import kinds
from bottega.client import ServiceActivity
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import GenerateRequest
from bottega.v1.image_pb2_grpc import ImageServiceStub
from tests.e2e.conftest import Suite
from tests.support.services import Service
from tests.support.waiting import wait_until


def test_logs_are_json_lines_with_the_request_id_and_the_job_id(suite: Suite, images: ImageServiceStub) -> None:
    spec = GenerationSpec(prompt="a red star", num_inference_steps=2)
    answers = list(images.Generate(GenerateRequest(request_id="log-me-7", spec=spec), timeout=30))

    story = {suite.gateway: ["job accepted", "job completed"], suite.worker: ["attempt started", "attempt completed"]}
    for service, told in story.items():
        wait_until(lambda: told[-1] in _said(service, "log-me-7"), f"the lines of {service.name}")  # noqa: B023 - at once
        assert _said(service, "log-me-7") == told
        assert {line["job_id"] for line in _lines(service, "log-me-7")} == {answers[0].event.job_id}


def _lines(service: Service, request_id: str) -> list[dict[str, Any]]:
    return [line for line in service.events() if line.get("request_id") == request_id]


def _said(service: Service, request_id: str) -> list[str]:
    return [line["event"] for line in _lines(service, request_id)]


def _activity(suite: Suite) -> dict[str, ServiceActivity]:
    """What the gateway and its workers have counted, by kind."""
    return {member.kind: member.load.activity for member in suite.client.fleet().members}


def test_whoever_looks_at_the_fleet_is_told_what_was_done(suite: Suite) -> None:
    before = _activity(suite)
    suite.client.generate("a red star", num_inference_steps=5)

    def done() -> bool:
        # What came before it may have been reported since then.
        after = _activity(suite)
        engine, gateway = after[kinds.WORKER], after[kinds.GATEWAY]
        return (
            engine.completed > before[kinds.WORKER].completed
            and engine.steps >= before[kinds.WORKER].steps + 5
            and engine.turns >= before[kinds.WORKER].turns + 5
            and gateway.completed > before[kinds.GATEWAY].completed
        )

    wait_until(done, "the worker and the gateway to count it")
