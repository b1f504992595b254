"""The suite for benches of LoRAs: a gateway, a LoRA store, a worker, and a ControlNet server where one is wanted."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from bottega import kinds
from bottega.client import Client
from tests.support.services import Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

JOIN_S = 60.0
_SERVER = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Whom to start. folder: for configurations, logs and the store's files; what is in it already is kept.

    model: "miniature", or a folder; base: what requests call it. engine, store: settings. controlnets: by name, those
    of a server, which has server_threads. worker: whether one is started at once.
    """

    folder: Path
    model: str
    base: str
    engine: Mapping[str, object]
    store: Mapping[str, object]
    controlnets: Mapping[str, str]
    server_threads: int = 1
    worker: bool = True


def cold_cast(
    folder: Path,
    model: Path,
    *,
    base: str,
    threads: int,
    links: Mapping[str, object] | None = None,
    controlnets: Mapping[str, str] | None = None,
    worker: bool = True,
) -> Cast:
    """Nothing stays where nobody waits for it: the LoRAs of every request come from the store's disk.

    threads: of engines. links: the store's settings of them.
    """
    return Cast(
        folder=folder,
        model=str(model),
        base=base,
        engine={"threads": threads, "loras": {"budget_bytes": 1}},
        store={"links": links or {}, "budget_bytes": 1},
        controlnets=controlnets or {},
        server_threads=threads,
        worker=worker,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSuite:
    """What runs. client: of its gateway. services: with which more is started."""

    cast: Cast
    client: Client
    store: Service
    services: Services
    gateway: Service

    def start_worker(self) -> Service:
        """Starts a worker and returns when it can be given work; stop it, or it ends with all."""
        engine = {"model": self.cast.model, "model_name": self.cast.base, **self.cast.engine}
        config = worker_config(self.gateway.fleet, name="worker", engine=engine)
        worker = self.services.start("worker", config)
        wait_until(lambda: bool(self.client.models()), "the worker to join", within_s=JOIN_S)
        return worker

    def restart_store(self, settings: Mapping[str, object]) -> LoraSuite:
        """The suite with its store stopped and started again, with the same files and these settings."""
        self.store.stop()
        wait_until(lambda: not _has_store(self.client), "the store to be missed", within_s=JOIN_S)
        store = _start_store(self.cast, self.services, self.gateway, settings)
        wait_until(lambda: _has_store(self.client), "the store to join", within_s=JOIN_S)
        return replace(self, store=store)

    def with_engine(self, engine: Mapping[str, object]) -> LoraSuite:
        """The suite whose workers, from now on, start with these settings."""
        return replace(self, cast=replace(self.cast, engine=engine))


@contextmanager
def suite(cast: Cast) -> Iterator[LoraSuite]:
    """All of it, stopped in the end."""
    cast.folder.mkdir(parents=True, exist_ok=True)
    with Services(cast.folder) as services:
        gateway = services.start("gateway", gateway_config())
        store = _start_store(cast, services, gateway, cast.store)
        if cast.controlnets:
            _start_server(cast, services, gateway)
        with Client(gateway.address, fleet_address=gateway.fleet, timeout_s=600) as client:
            running = LoraSuite(cast=cast, client=client, store=store, services=services, gateway=gateway)
            if cast.worker:
                running.start_worker()
            wait_until(lambda: _has_store(client), "the store to join", within_s=JOIN_S)
            wait_until(
                lambda: len(client.controlnets()) >= len(cast.controlnets), "the server to join", within_s=JOIN_S
            )
            yield running


def processor_s() -> float:
    """Seconds of processor time that all processes below this one have used, those that ended included."""
    running = [_spent_s(process) for process in psutil.Process().children(recursive=True)]
    mine = psutil.Process().cpu_times()
    return float(sum(running) + mine.children_user + mine.children_system)


def figures(service: Service) -> dict[str, float]:
    """What a service's metrics say now: by name, with a label's value behind a colon where there is one."""
    with urllib.request.urlopen(f"http://{service.metrics}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        ":".join((sample.name, *sample.labels.values())): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _start_store(cast: Cast, services: Services, gateway: Service, settings: Mapping[str, object]) -> Service:
    config = {
        "name": "loras",
        "gateway": gateway.fleet,
        "server": _SERVER,
        "folder": str(cast.folder / "loras"),
        "bases": {cast.base: cast.model},
        **settings,
    }
    return services.start("loras", config)


def _start_server(cast: Cast, services: Services, gateway: Service) -> Service:
    config = {
        "name": "server",
        "gateway": gateway.fleet,
        "server": _SERVER,
        "engine": {"threads": cast.server_threads},
        "controlnets": dict(cast.controlnets),
    }
    return services.start("controlnet", config)


def _has_store(client: Client) -> bool:
    kind = kinds.LORAS
    return any(member.kind == kind for member in client.fleet().members)


def _spent_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
