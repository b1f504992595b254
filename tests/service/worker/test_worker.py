"""A real worker process with the embedded model: what a gateway gets from it over gRPC."""

from __future__ import annotations

import io
import signal
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image

from bottega.miniature import WEIGHTS
from bottega.rpc.channel import channel_options
from bottega.v1 import error_pb2, generation_pb2, worker_pb2, worker_pb2_grpc
from tests.support.services import SMALL_ENGINE, Service, Services, worker_config
from tests.support.waiting import wait_until

ENGINE = {**SMALL_ENGINE, "checkpoint_interval_s": 0.1}
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Services(tmp_path_factory.mktemp("worker")) as services:
        yield services.start("bottega.worker", worker_config("", name="w1", engine=ENGINE))


@pytest.fixture(scope="module")
def channel(worker: Service) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(worker.address, options=channel_options()) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> worker_pb2_grpc.WorkerServiceStub:
    return worker_pb2_grpc.WorkerServiceStub(channel)


def request(
    job_id: str, *, steps: int = 6, number: int = 1, image: bytes | None = None
) -> worker_pb2.RunAttemptRequest:
    spec = generation_pb2.GenerationSpec(
        model="miniature",
        prompt="a big red star on the left on a blue background",
        num_inference_steps=steps,
        guidance_scale=4.0,
        width=64,
        height=64,
        seed=11,
        num_images=1,
        sampler=generation_pb2.SAMPLER_EULER,
        image=image,
        strength=0.5 if image else None,
    )
    return worker_pb2.RunAttemptRequest(attempt=worker_pb2.AttemptId(job_id=job_id, number=number), spec=spec)


def run(
    stub: worker_pb2_grpc.WorkerServiceStub, order: worker_pb2.RunAttemptRequest
) -> list[worker_pb2.RunAttemptResponse]:
    return list(stub.RunAttempt(order, timeout=TIMEOUT_S))


def picture(events: list[worker_pb2.RunAttemptResponse]) -> bytes:
    assert events[-1].WhichOneof("event") == "completed", events[-1]
    return b"".join(event.image.chunk for event in events if event.HasField("image"))


def engine_of(worker: Service) -> psutil.Process | None:
    children = psutil.Process(worker.process.pid).children()
    return next((child for child in children if "bottega.worker.engine.main" in child.cmdline()), None)


def is_serving(channel: grpc.Channel) -> bool:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_a_picture_is_drawn_and_says_how(stub: worker_pb2_grpc.WorkerServiceStub, channel: grpc.Channel) -> None:
    assert is_serving(channel)
    events = run(stub, request("draw"))
    with Image.open(io.BytesIO(picture(events))) as image:
        assert (image.format, image.size) == ("PNG", (64, 64))
        assert "big red star" in image.info["bottega"]
    provenance = events[-1].completed.provenance
    assert (provenance.worker, provenance.dtype, provenance.device) == ("w1", "float32", "cpu")
    assert len(provenance.model_hash) == 64
    stages = {time.stage for time in provenance.times}
    assert {"encode", "denoise", "decode", "handoff", "encode_image"} <= stages
    assert events[0].started.steps_total == 6


def test_image_to_image_starts_from_the_source(stub: worker_pb2_grpc.WorkerServiceStub) -> None:
    source = io.BytesIO()
    Image.new("RGB", (100, 80), "green").save(source, "PNG")
    events = run(stub, request("redraw", image=source.getvalue()))
    assert picture(events) != picture(run(stub, request("draw again")))
    provenance = events[-1].completed.provenance
    assert provenance.begin_step == 3
    assert provenance.image_digest


def test_attaching_again_gets_the_same_bytes(stub: worker_pb2_grpc.WorkerServiceStub) -> None:
    order = request("attach", steps=20)
    call = stub.RunAttempt(order, timeout=TIMEOUT_S)
    assert next(call).HasField("started")
    call.cancel()
    first, second = run(stub, order), run(stub, order)
    assert picture(first) == picture(second)
    assert picture(first) == picture(run(stub, request("alone", steps=20)))


def test_cancelling_stops_the_engine_too(stub: worker_pb2_grpc.WorkerServiceStub) -> None:
    order = request("cancel", steps=200)
    call = stub.RunAttempt(order, timeout=TIMEOUT_S)
    assert next(call).HasField("started")
    assert stub.CancelAttempt(worker_pb2.CancelAttemptRequest(attempt=order.attempt), timeout=5).known
    assert list(call)[-1].failed.reason == error_pb2.ERROR_REASON_JOB_CANCELLED
    names = [a.attempt.job_id for a in stub.ListAttempts(worker_pb2.ListAttemptsRequest(), timeout=5).attempts]
    assert "cancel" not in names


def test_an_attempt_resumes_from_its_checkpoint_with_the_same_picture(
    stub: worker_pb2_grpc.WorkerServiceStub,
) -> None:
    order = request("resume", steps=60)
    order.spec.sampler = generation_pb2.SAMPLER_EULER_ANCESTRAL
    watching = stub.WatchCheckpoints(worker_pb2.WatchCheckpointsRequest(), timeout=TIMEOUT_S)
    call = stub.RunAttempt(order, timeout=TIMEOUT_S)
    checkpoint = next(c for c in watching if c.attempt == order.attempt)
    watching.cancel()
    whole = list(call)
    order.attempt.number = 2
    order.checkpoint = checkpoint.checkpoint
    resumed = run(stub, order)
    assert resumed[0].started.steps_resumed == checkpoint.steps_done > 0
    assert picture(resumed) == picture(whole)


def test_metrics_count_what_happened(stub: worker_pb2_grpc.WorkerServiceStub, worker: Service) -> None:
    run(stub, request("metrics"))
    text = urllib.request.urlopen(f"http://{worker.metrics}/metrics", timeout=5).read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['bottega_worker_attempts_total{outcome="completed"}']) >= 1
    assert float(values["bottega_worker_steps_total"]) >= 6
    assert float(values['bottega_worker_codec_seconds_count{work="encode"}']) >= 1
    assert float(values["bottega_worker_running"]) == 0


def test_a_killed_engine_costs_what_it_held_and_comes_back(
    stub: worker_pb2_grpc.WorkerServiceStub, channel: grpc.Channel, worker: Service
) -> None:
    order = request("lost", steps=200)
    call = stub.RunAttempt(order, timeout=TIMEOUT_S)
    assert next(call).HasField("started")
    engine = engine_of(worker)
    assert engine is not None
    engine.send_signal(signal.SIGKILL)
    assert list(call)[-1].failed.reason == error_pb2.ERROR_REASON_WORKER_LOST
    wait_until(lambda: is_serving(channel), "the engine to come back")
    assert picture(run(stub, request("after"))) == picture(run(stub, request("after", number=2)))


def test_a_worker_told_to_stop_finishes_what_runs_and_leaves_no_process(
    stub: worker_pb2_grpc.WorkerServiceStub, worker: Service
) -> None:
    children = psutil.Process(worker.process.pid).children()
    call = stub.RunAttempt(request("last", steps=40), timeout=TIMEOUT_S)
    assert next(call).HasField("started")
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    assert picture(list(call))
    stopping.join()
    assert worker.process.returncode == 0
    _gone, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def test_a_model_that_cannot_be_loaded_ends_the_start(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("broken")
    with (
        Services(folder) as services,
        pytest.raises(AssertionError, match="the engine could not be started"),
    ):
        services.start("bottega.worker", worker_config("", name="w2", engine={"model": str(WEIGHTS / "nowhere")}))
