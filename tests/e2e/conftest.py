"""One running suite for all end-to-end tests: gateway, worker of the embedded model and LoRA store, as processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import pytest

from bottega.client import Client
from bottega.rpc.channel import channel_options
from bottega.v1.image_pb2_grpc import ImageServiceStub
from tests.support.services import FREE_PORTS, Service, Services, gateway_config, worker_config
from tests.support.stock import Stock
from tests.support.waiting import wait_until

LORA_TIMEOUT_S = 8.0
_ENGINE = {
    "model": "miniature",
    "threads": 1,
    "max_rows": 4,
    "checkpoint_interval_s": 0.2,
    "loras": {"timeout_s": LORA_TIMEOUT_S, "silence_s": 2.0},
}
# To a worker: a LoRA of a megabyte takes seconds.
_STORE_BYTES_PER_S = 400_000


@dataclass(slots=True, kw_only=True)
class Suite:
    """A gateway with one worker and a LoRA store, behind a slow link, that have joined it."""

    gateway: Service
    worker: Service
    store: Service
    client: Client
    services: Services

    def restart_store(self) -> None:
        """Another life of a store that was killed."""
        self.store = _start_store(self.services, self.gateway)
        self.wait_for_store()

    def restart_worker(self) -> None:
        """Another worker in the place of one that was killed."""
        wait_until(lambda: not self.has_worker(), "the worker to be lost")
        self.worker = _start_worker(self.services, self.gateway)
        wait_until(self.has_worker, "the worker to join")

    def has_worker(self) -> bool:
        return any(model.workers for model in self.client.models())

    def wait_for_store(self) -> None:
        wait_until(lambda: self.store.address in _addresses(self.client), "the store to join")


def _start_worker(services: Services, gateway: Service) -> Service:
    return services.start("worker", worker_config(gateway.fleet, name="w1", engine=_ENGINE))


def _start_store(services: Services, gateway: Service) -> Service:
    links = {"bytes_per_s": _STORE_BYTES_PER_S}
    config = {"name": "loras", "gateway": gateway.fleet, "server": FREE_PORTS, "links": links}
    return services.start("loras", config, name="loras")


def _addresses(client: Client) -> set[str]:
    return {member.address for member in client.fleet().members}


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    with Services(tmp_path_factory.mktemp("suite")) as services, ThreadPoolExecutor(1) as pool:
        gateway = services.start("gateway", gateway_config())
        starting = pool.submit(_start_worker, services, gateway)
        store = _start_store(services, gateway)
        worker = starting.result()
        with Client(gateway.address, fleet_address=gateway.fleet, timeout_s=60.0) as client:
            suite = Suite(gateway=gateway, worker=worker, store=store, client=client, services=services)
            wait_until(suite.has_worker, "the worker to join")
            suite.wait_for_store()
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
