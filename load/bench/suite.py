"""The suite as real processes for a bench: one gateway and one worker of one model, on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bottega.client import Client
from tests.support.services import Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

JOIN_TIMEOUT_S = 10.0


@contextmanager
def running(model: str, threads: int, folder: Path) -> Iterator[str]:
    """The address of a gateway whose worker serves `model` ("miniature" or a folder) and has joined."""
    with running_gateway(model, threads, folder) as gateway:
        yield gateway.address


@contextmanager
def running_gateway(model: str, threads: int, folder: Path, **gateway_overrides: object) -> Iterator[Service]:
    """That gateway. gateway_overrides: of its configuration."""
    folder.mkdir(parents=True)
    with Services(folder) as services:
        gateway = services.start("gateway", gateway_config(**gateway_overrides))
        engine = {"model": model, "threads": threads}
        services.start("worker", worker_config(gateway.fleet, name="worker", engine=engine))
        with Client(gateway.address) as client:
            wait_until(lambda: bool(client.models()), "the worker to join", within_s=JOIN_TIMEOUT_S)
        yield gateway
