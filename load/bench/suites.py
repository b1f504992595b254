"""Suites of real services for benches, as processes of their own on this machine."""

from __future__ import annotations

import os
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from prometheus_client.parser import text_string_to_metric_families

from bottega import kinds
from bottega.client import Client, Picture
from bottega.client.suite.plan import free_ports
from bottega.client.transport import credentials
from bottega.rpc.security.caller import Identity, Role
from bottega.rpc.security.certificates import CertificateFolder
from load.bench.throttle import Throttle
from tests.support.services import FREE_PORTS, Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

# For all services, while the cores are shared, with what a worker tries before it serves.
JOIN_S = 300.0
CALL_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A gateway and the services that have joined it."""

    folder: Path
    gateway: Service
    client: Client
    services: Services
    members: dict[str, Service]
    """Services by name, without the gateway."""
    settings: dict[str, Mapping[str, object]]
    """Settings of these."""

    @property
    def address(self) -> str:
        """The gateway's address."""
        return self.gateway.address

    @property
    def model_hash(self) -> str:
        """Digest of the only model that is served."""
        (model,) = self.client.models()
        return model.model_hash

    def start(self, name: str, settings: Mapping[str, object], *, core: int | None = None) -> Service:
        """Start a service and return when it has joined.

        Args:
            name: Its kind, or `worker-N`.
            settings: Of its configuration, beside what every service has.
            core: The only one that it may use.
        """
        kind = name.partition("-")[0]
        self.settings[name] = settings
        common: dict[str, object] = {"name": name, "gateway": self.gateway.fleet, "server": FREE_PORTS}
        if kind == kinds.WORKER:
            config = worker_config(self.gateway.fleet, name=name, **settings)  # type: ignore[arg-type]
        elif kind == kinds.CONTROLNET:
            config = {**common, **settings}
        else:
            config = {**common, "folder": str(self.folder / kind), **settings}
        with nullcontext() if core is None else pinned(core):
            service = self.members[name] = self.services.start(kind, config)
        return service

    def wait_until_joined(self) -> None:
        """Return when every service that was started has joined, and can be used."""
        wait_until(self._joined, "all to join", within_s=JOIN_S)

    def wait_until_left(self, name: str) -> None:
        """Return when the gateway lists a stopped service no more."""
        wait_until(lambda: name not in self._names(), f"{name} to leave", within_s=JOIN_S)

    def draw(self, prompt: str, **options: Any) -> tuple[Picture, float]:
        """Return a picture, and the seconds that it took."""
        began_s = time.perf_counter()
        picture = self.client.generate(prompt, **options)
        return picture, time.perf_counter() - began_s

    def _names(self) -> set[str]:
        return {member.name for member in self.client.fleet().members}

    def _joined(self) -> bool:
        nets: Any = self.settings.get(kinds.CONTROLNET, {}).get("controlnets", ())
        return (
            self._names() >= self.members.keys()
            and bool(self.client.models()) == any(name.startswith(kinds.WORKER) for name in self.members)
            and len(self.client.controlnets()) >= len(nets)
        )


@contextmanager
def suite(
    folder: Path,
    services: Mapping[str, Mapping[str, object]],
    *,
    gateway: Mapping[str, object] | None = None,
    cores: Mapping[str, int] | None = None,
) -> Iterator[Suite]:
    """Run a gateway and services, which have joined when the block begins.

    Args:
        folder: For configurations, logs and the stores' files; those that are there are kept.
        services: Settings by name, see `Suite.start`; they start in this order.
        gateway: Settings of the gateway.
        cores: The only core of a service, by its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with Services(folder) as started:
        first = started.start("gateway", gateway_config(**(gateway or {})))
        with Client(first.address, fleet_address=first.fleet, timeout_s=CALL_S) as client:
            running = Suite(folder=folder, gateway=first, client=client, services=started, members={}, settings={})
            for name, settings in services.items():
                running.start(name, settings, core=(cores or {}).get(name))
            running.wait_until_joined()
            yield running


@contextmanager
def plain_suite(model: str, threads: int, folder: Path, *, tls: bool = False, **gateway: object) -> Iterator[Service]:
    """Run a gateway and a worker, and give the gateway.

    Args:
        model: "miniature", or a folder.
        tls: Whether services and clients know each other by certificates.
        gateway: Settings of the gateway.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = stack.enter_context(_certificates(folder / "certs")) if tls else {}
        services = stack.enter_context(Services(folder))
        served = services.start("gateway", gateway_config(server=_server(files.get("gateway")), **gateway))
        worker = worker_config(served.fleet, name="worker", engine={"model": model, "threads": threads})
        services.start("worker", {**worker, "server": _server(files.get("worker"))})
        with Client(served.address) as client:
            wait_until(lambda: bool(client.models()), "the worker to join", within_s=JOIN_S)
        yield served


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Run what is started in the block on one core, where there are several. Blocks do not nest."""
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    os.sched_setaffinity(0, {cores[core % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def check_apart(one: Service, other: Service) -> None:
    """Raise SystemExit where two services share a core: measured would be that they take turns."""
    theirs = [os.sched_getaffinity(each.process.pid) for each in (one, other)]
    if theirs[0] & theirs[1]:
        raise SystemExit(f"{one.name} and {other.name} need a core each; they have {theirs[0]} and {theirs[1]}")


def relayed(throttle: Throttle) -> dict[str, object]:
    """Return settings of links that are reached through the relay alone."""
    throttle.target = free_ports(1)[0]
    return {
        "socket": None,
        "listen": f"127.0.0.1:{throttle.target}",
        "advertised": f"127.0.0.1:{throttle.port}",
    }


def stage_s(picture: Picture, *stages: str) -> float:
    """Return the seconds of these stages, by the provenance."""
    return sum(spent.seconds for spent in picture.provenance.times if spent.stage in stages)


def step_s(picture: Picture) -> float:
    """Return the mean seconds of a step, with everything that the engine does in it."""
    spent_s = stage_s(picture, "denoise", "batch", "controlnets")
    return spent_s / picture.provenance.parameters.num_inference_steps


def children_processor_s() -> float:
    """Return the processor seconds of all processes below this one, those that ended included."""
    own = psutil.Process()
    mine = own.cpu_times()
    spent_s = sum(processor_s(child.pid, ended=True) for child in own.children(recursive=True))
    return float(spent_s + mine.children_user + mine.children_system)


def processor_s(pid: int, *, ended: bool = False) -> float:
    """Return the processor seconds of one process; 0 where it is gone.

    Args:
        ended: Whether those of its ended children count as well.
    """
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    children_s = times.children_user + times.children_system if ended else 0.0
    return float(times.user + times.system + children_s)


def scraped(service: Service, path: str = "/metrics") -> bytes:
    """Return what a service answers on its port for Prometheus."""
    with urllib.request.urlopen(f"http://{service.metrics}{path}", timeout=10) as answer:
        return bytes(answer.read())


def metrics_of(service: Service) -> dict[str, float]:
    """Return a service's metrics by name, each label's value behind a colon."""
    return {
        ":".join((sample.name, *sample.labels.values())): float(sample.value)
        for family in text_string_to_metric_families(scraped(service).decode())
        for sample in family.samples
    }


def print_accelerations(client: Client) -> None:
    """Print what the workers have kept: by chance it may differ from run to run."""
    for member in client.fleet().members:
        for each in member.load.accelerations:
            kept = "kept" if each.kept else "not kept"
            print(f"{each.name}: {each.speedup:.2f} times as fast, {kept}", file=sys.stderr, flush=True)


@contextmanager
def _certificates(folder: Path) -> Iterator[Mapping[str, Mapping[str, str]]]:
    """Give the files of a gateway and a worker, by kind. In the block clients are an operator."""
    made = CertificateFolder(folder)
    made.make_authority(days=1)
    files = {}
    for role, name in ((Role.GATEWAY, "gateway"), (Role.WORKER, "worker"), (Role.OPERATOR, "bench")):
        paths = made.issue(Identity(role=role, name=name), days=1)
        files[str(role)] = {
            "authority": str(made.authority_path),
            "certificate": str(paths.certificate),
            "key": str(paths.key),
        }
    own = files[str(Role.OPERATOR)]
    known = (own["authority"], own["certificate"], own["key"])
    with mock.patch.dict(os.environ, dict(zip(credentials.VARIABLES, known, strict=True))):
        yield files


def _server(tls: Mapping[str, str] | None) -> Mapping[str, object]:
    return {**FREE_PORTS, "tls": dict(tls)} if tls else FREE_PORTS
