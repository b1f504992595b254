"""Real workers with one role behind a gateway: they join as such, are asked by links, and are missed when they go."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from bottega.client import Client, Completed, Picture, Progress
from bottega.errors import NoWorker
from bottega.rpc.channel import channel_options
from bottega.v1 import generation_pb2, worker_pb2, worker_pb2_grpc
from tests.support.services import SMALL_ENGINE, Service, Services, gateway_config, worker_config
from tests.support.stock import Pixels, Stock, assert_same_image, pixels_of
from tests.support.waiting import wait_until
from tests.support.worker_pair import OPTIONS as WHOLE_SPEC

PROMPT = "a big red star on the left on a blue background"
OPTIONS: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 5.0, "seed": 7}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Service]]:
    with Services(tmp_path_factory.mktemp("stages")) as services:
        gateway = services.start("gateway", gateway_config(model_grace_s=1.0))
        roles = {"den": ["denoise"], "enc": ["encode"], "dec": ["decode"]}
        workers: dict[str, Service] = {}
        for name, own in roles.items():
            config = worker_config(gateway.fleet, name=name, engine={**SMALL_ENGINE, "max_rows": 2, "roles": own})
            workers[name] = services.start("worker", config)
        yield {"gateway": gateway, **workers}


@pytest.fixture(scope="module")
def wanted() -> Pixels:
    """What stock Diffusers draws."""
    return Stock().draw(PROMPT, **OPTIONS)


@pytest.fixture
def client(running: dict[str, Service]) -> Iterator[Client]:
    gateway = running["gateway"]
    with Client(gateway.address, fleet_address=gateway.fleet) as client:
        yield client


def test_three_workers_draw_the_picture_of_stock_diffusers(client: Client, wanted: Pixels) -> None:
    picture = client.generate(PROMPT, **OPTIONS)
    assert_same_image(pixels_of(picture.pil()), wanted)
    assert picture.provenance.exact
    fleet = client.fleet()
    assert {member.name: member.kind for member in fleet.members if member.kind != "gateway"} == {
        "den": "worker",
        "enc": "encode",
        "dec": "decode",
    }
    assert [model.name for kind in ("encode", "decode") for model in fleet.of_kind(kind)[0].models] == ["miniature"] * 2


def engine_pid(service: Service) -> int:
    """The process that computes for it now."""
    return [int(event["pid"]) for event in service.events() if event["event"] == "engine ready"][-1]


def test_a_job_ends_alike_though_its_decoder_is_killed(
    client: Client, running: dict[str, Service], wanted: Pixels
) -> None:
    before = engine_pid(running["dec"])
    os.kill(before, signal.SIGSTOP)  # so that it cannot decode before it is killed
    pictures: list[Picture] = []
    for event in client.stream(PROMPT, **OPTIONS):
        if (
            isinstance(event, Progress)
            and event.steps_done == event.steps_total
            and engine_pid(running["dec"]) == before
        ):
            with contextlib.suppress(ProcessLookupError):  # it is told once more when the job is attempted again
                os.kill(before, signal.SIGKILL)
        elif isinstance(event, Completed):
            pictures += event.images
    assert_same_image(pixels_of(pictures[0].pil()), wanted)
    assert engine_pid(running["dec"]) != before, "another engine decodes"


def test_a_worker_with_one_role_takes_no_attempts(running: dict[str, Service]) -> None:
    with grpc.insecure_channel(running["dec"].address, options=channel_options()) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        spec = generation_pb2.GenerationSpec(**WHOLE_SPEC)
        attempt = worker_pb2.RunAttemptRequest(attempt=worker_pb2.AttemptId(job_id="j", number=1), spec=spec)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.RunAttempt(attempt, timeout=20))
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "this worker has the role decode only" in str(refused.value.details())


def test_a_job_fails_with_the_role_that_is_missing(client: Client, running: dict[str, Service]) -> None:
    running["dec"].stop()
    wait_until(lambda: not client.fleet().of_kind("decode"), "it has left")
    with pytest.raises(NoWorker, match="den lacks the role decode, and no worker with only this role serves its model"):
        client.generate(PROMPT, **OPTIONS)
