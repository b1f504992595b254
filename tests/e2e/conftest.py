"""One running suite for many end-to-end tests: gateway, worker of the embedded model and LoRA store, as processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from bottega import kinds
from bottega.client import Client
from bottega.rpc.channel import channel_options
from bottega.v1.image_pb2_grpc import ImageServiceStub
from tests.support.services import SMALL_ENGINE, Service, Services, gateway_config, worker_config
from tests.support.stock import Stock
from tests.support.waiting import wait_until

ENGINE = {**SMALL_ENGINE, "checkpoint_interval_s": 0.2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A gateway with one worker and a LoRA store that have joined it."""

    gateway: Service
    worker: Service
    store: Service
    client: Client


@contextmanager
def running_suite(folder: Path, engine: Mapping[str, object], **store: object) -> Iterator[Suite]:
    """engine: configuration of the worker's. store: that of the LoRA store, beside where it is."""
    with Services(folder) as services, ThreadPoolExecutor(1) as pool:
        gateway = services.start("gateway", gateway_config())
        starting = pool.submit(services.start, "worker", worker_config(gateway.fleet, name="w1", engine=engine))
        server = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"}
        loras = services.start("loras", {"name": "loras", "gateway": gateway.fleet, "server": server, **store})
        worker = starting.result()
        with Client(gateway.address, fleet_address=gateway.fleet, timeout_s=60.0) as client:
            wait_until(lambda: bool(client.models()), "the worker to join")
            wait_until(lambda: kinds.LORAS in _kinds(client), "the store to join")
            yield Suite(gateway=gateway, worker=worker, store=loras, client=client)


def _kinds(client: Client) -> set[str]:
    return {member.registration.kind for member in client.fleet().members}


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    with running_suite(tmp_path_factory.mktemp("suite"), ENGINE) as suite:
        yield suite


@pytest.fixture(scope="session")
def client(suite: Suite) -> Client:
    return suite.client


@pytest.fixture(scope="session")
def images(suite: Suite) -> Iterator[ImageServiceStub]:
    """The contract's own stub, for what the SDK cannot say."""
    with grpc.insecure_channel(suite.gateway.address, options=channel_options()) as channel:
        yield ImageServiceStub(channel)


@pytest.fixture(scope="session")
def stock() -> Stock:
    return Stock()
