"""What operators rely on, for each service as it really runs: health, reflection, metrics, logs."""

from __future__ import annotations

import re
import urllib.request
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bottega import kinds
from bottega.client import Client, ServiceActivity
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import GenerateRequest
from bottega.v1.image_pb2_grpc import ImageServiceStub
from tests.e2e.conftest import Suite
from tests.support.services import Service
from tests.support.waiting import wait_until

CONTRACT = {
    "gateway": {"bottega.v1.ImageService"},
    "worker": {"bottega.v1.WorkerService", "bottega.v1.TemplateService"},
}


@pytest.fixture(params=sorted(CONTRACT))
def service(request: pytest.FixtureRequest, suite: Suite) -> Service:
    found = getattr(suite, request.param)
    assert isinstance(found, Service)
    return found


def _contract(service: Service) -> set[str]:
    return CONTRACT[service.name.partition("-")[0]]


def test_health_is_serving_for_the_server_and_all_that_reflection_lists(service: Service) -> None:
    with grpc.insecure_channel(service.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = list(stub.ServerReflectionInfo(iter([question]), timeout=5))  # type: ignore[operator]  # a gap in its types
        listed = {found.name for found in answers[0].list_services_response.service}
        assert _contract(service) | {"grpc.health.v1.Health"} <= listed

        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", *_contract(service)):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)  # type: ignore[attr-defined]  # as above
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, name


def test_metrics_are_on_loopback_and_count_calls(service: Service, client: Client) -> None:
    client.generate("a red star", num_inference_steps=2)

    assert service.metrics.startswith("127.0.0.1:")
    method = "Generate" if "bottega.v1.ImageService" in _contract(service) else "RunAttempt"
    counted = re.compile(rf'bottega_rpc_calls_total\{{code="OK",method="[^"]*{method}"\}} [1-9]')
    # A call is counted when it has ended, a moment after its caller has the last message.
    wait_until(lambda: counted.search(_metrics(service)) is not None, f"{method} to be counted")


def _metrics(service: Service) -> str:
    with urllib.request.urlopen(f"http://{service.metrics}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
    return text


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
