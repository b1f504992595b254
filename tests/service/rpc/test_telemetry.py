"""A service whose environment names a collector: its calls and the spans of its jobs arrive there, by OTLP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from bottega.client.suite.plan import free_ports
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.services import Service, Services, gateway_config

SERVER, CLIENT = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes what is exported. services: of each span, as it calls itself."""

    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self.arrived:
            for resource in request.resource_spans:
                named = [each.value.string_value for each in resource.resource.attributes if each.key == "service.name"]
                self.services.update(named)
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str, kind: int | None = None) -> Span:
        """The first of that name, once it is here."""

        def found() -> list[Span]:
            return [span for span in self.spans if span.name == name and kind in (None, span.kind)]

        with self.arrived:
            assert self.arrived.wait_for(found, 20.0), f"no {name} among {sorted(span.name for span in self.spans)}"
            return found()[0]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    taken = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(taken, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    yield taken
    server.stop(None).wait()


async def draw(gateway: Service) -> str:
    """Has a worker that follows a script draw a picture. Returns the job's id."""
    worker = ScriptedWorker("w1", gateway.fleet, step_s={2: 0.01})
    await worker.start()
    try:
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            request = image_pb2.GenerateRequest(spec=GenerationSpec(prompt="a star"))
            events = [each.event async for each in image_pb2_grpc.ImageServiceStub(channel).Generate(request)]
    finally:
        await worker.die()
    assert events[-1].WhichOneof("event") == "completed"
    return events[-1].job_id


def attributes(span: Span) -> dict[str, str]:
    return {each.key: each.value.string_value for each in span.attributes}


async def test_calls_and_the_spans_of_jobs_are_exported(collector: Collector, tmp_path: Path) -> None:
    with Services(tmp_path) as services:
        gateway = await asyncio.to_thread(services.start, "gateway", gateway_config())
        job_id = await draw(gateway)
        generate = await asyncio.to_thread(collector.named, "/bottega.v1.ImageService/Generate", SERVER)
        run = await asyncio.to_thread(collector.named, "/bottega.v1.WorkerService/RunAttempt", CLIENT)
        attempt = await asyncio.to_thread(collector.named, "attempt 1")
        job = await asyncio.to_thread(collector.named, "job, attempt 1")
        queue = await asyncio.to_thread(collector.named, "queue")
    assert collector.services == {"bottega-gateway"}
    assert (attributes(job)["bottega.job_id"], job.parent_span_id) == (job_id, b"")
    assert queue.trace_id == attempt.trace_id == job.trace_id
    assert queue.parent_span_id == attempt.parent_span_id == job.span_id
    assert attributes(queue)["bottega.service"] == "gateway"
    assert generate.start_time_unix_nano - 10**7 < queue.start_time_unix_nano < generate.end_time_unix_nano
    assert run.start_time_unix_nano < job.end_time_unix_nano
    assert not [span.name for span in collector.spans if "Join" in span.name or "Health" in span.name]


async def test_a_collector_that_is_away_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")  # longer than a service may take to end
    with Services(tmp_path) as services:
        gateway = await asyncio.to_thread(services.start, "gateway", gateway_config())
        assert await draw(gateway)
        assert await asyncio.to_thread(gateway.stop) == 0
