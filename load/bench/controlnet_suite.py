"""The suite for benches of one ControlNet: a gateway, a worker on the first core, a ControlNet server on the second."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bottega.client import Client
from bottega.client.suite.plan import free_ports
from load.bench.throttle import Throttle
from tests.support.services import Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

JOIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Whom to start. folder: for configurations and logs. model: of the worker. net: what the server calls "edges"."""

    folder: Path
    model: str
    net: Path


@contextmanager
def suite(cast: Cast, name: str, server: Mapping[str, object], engine: Mapping[str, object]) -> Iterator[Client]:
    """All, the last two with a thread each. server, engine: settings of the server's engine and of the worker's."""
    folder = cast.folder / name
    folder.mkdir()
    with Services(folder) as services:
        gateway = services.start("gateway", gateway_config())
        with pinned(1):
            remote = _start_server(cast, services, gateway, server)
        with pinned(0):
            said = {"model": cast.model, "threads": 1, **engine}
            worker = services.start("worker", worker_config(gateway.fleet, name="worker", engine=said))
        check_apart(worker, remote)
        with Client(gateway.address, fleet_address=gateway.fleet, timeout_s=600) as client:
            wait_until(lambda: bool(client.models()) and bool(client.controlnets()), "all to join", within_s=JOIN_S)
            yield client


def relayed(throttle: Throttle) -> Mapping[str, object]:
    """Settings of a server's engine that workers reach through the relay alone."""
    throttle.target = free_ports(1)[0]
    links = {
        "socket": None,
        "listen": f"127.0.0.1:{throttle.target}",
        "advertised": f"127.0.0.1:{throttle.port}",
    }
    return {"links": links}


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """What is started in the block runs on this core alone, where there is more than one. Blocks do not nest."""
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    os.sched_setaffinity(0, {cores[core % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def check_apart(worker: Service, server: Service) -> None:
    """Raises where both are on one core: what is measured would be that they take turns."""
    theirs = [os.sched_getaffinity(each.process.pid) for each in (worker, server)]
    if theirs[0] & theirs[1]:
        raise SystemExit(f"worker and ControlNet server need a core each; they have {theirs[0]} and {theirs[1]}")


def _start_server(cast: Cast, services: Services, gateway: Service, engine: Mapping[str, object]) -> Service:
    config = {
        "name": "server",
        "gateway": gateway.fleet,
        "server": {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"},
        "engine": {"threads": 1, **engine},
        "controlnets": {"edges": str(cast.net)},
    }
    return services.start("controlnet", config)
