"""The suite of a soak: every kind of service, with budgets that fill soon, and each may fail and come back."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from bottega import kinds
from bottega.client import CacheProfile, Client, LengthClass, SkipProfile
from bottega.client.suite.plan import free_ports
from bottega.miniature import WEIGHTS
from tests.support.services import FREE_PORTS, Service, Services, worker_config
from tests.support.waiting import wait_until

CONTROLNETS, LORAS = ("edges", "layout"), ("striped", "dusk", "checked")
WORKERS = ("worker-a", "worker-b")
JOIN_S = 120.0
_MIB = 1 << 20
# Of what is asked of the gateway while services come and go.
_CALL_S = 30.0
# What the embedded model's requests fill in minutes: some hundred pictures, latents and recordings.
_GATEWAY = {
    "results_bytes": _MIB,
    "max_result_bytes": _MIB,
    "max_jobs": 100,
    "jobs_bytes": _MIB,
    "traces_bytes": _MIB,
    "identical_results": False,
}
_ENGINE = {
    "model": "miniature",
    "threads": 1,
    "max_rows": 8,
    "loras": {"budget_bytes": 4 * _MIB},
    "edits": {"activations_mib": 32},
    "cache": {"recording_bytes": 4 * _MIB},
}
_STORES: Mapping[str, Mapping[str, object]] = {
    kinds.LORAS: {"loras": {name: {"path": f"miniature/{name}"} for name in LORAS}, "min_free_bytes": 0},
    kinds.CACHE: {"budget_bytes": _MIB // 2, "min_free_bytes": 0},
    kinds.ACTIVATIONS: {"budget_bytes": 32 * _MIB, "disk_bytes": 64 * _MIB, "min_free_bytes": 0},
}
_CONTROLNET = "controlnets"
# Any recording under a picture's key is similar enough for a third of the steps.
_FRACTION = 0.3


class SoakSuite:
    """A suite that runs in a `with` block. Several threads may stop, kill, freeze and start its services.

    Args:
        folder: For configurations, logs and state; it must be empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services = Services(self.logs)
        port, fleet_port = free_ports(2)
        self.address, self.fleet_address = f"127.0.0.1:{port}", f"127.0.0.1:{fleet_port}"
        self._running: dict[str, Service] = {}
        self._lives: dict[str, list[Service]] = {}
        self._changing = threading.Lock()

    @property
    def state(self) -> Path:
        """The folder of all services' state; their logs are elsewhere, as a journal has them."""
        return self._folder / "state"

    @property
    def logs(self) -> Path:
        """The folder of logs, one file for each life of a service."""
        return self._folder / "services"

    @property
    def engines(self) -> Sequence[str]:
        """The services that have an engine process."""
        return (_CONTROLNET, *WORKERS)

    @property
    def names(self) -> Sequence[str]:
        """The names of all services."""
        return ("gateway", *_STORES, _CONTROLNET, *WORKERS)

    def __enter__(self) -> SoakSuite:
        self.logs.mkdir()
        try:
            for name in self.names:
                self.start(name)
            self._set_profile()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def start(self, name: str) -> None:
        """Start a service, with the state that it had; return when the gateway has it.

        Raises AssertionError where it does not come within JOIN_S.
        """
        kind, configuration = self._configuration(name)
        with self._changing:
            service = self._services.start(kind, configuration, name=f"{name}-{len(self._lives.get(name, ()))}")
            self._running[name] = service
            self._lives.setdefault(name, []).append(service)
        if name != "gateway":
            wait_until(lambda: name in self._joined(), f"{name} to join", within_s=JOIN_S)

    def kill(self, name: str) -> None:
        """End a service as a crash would."""
        self._running[name].kill()

    def stop(self, name: str) -> None:
        """End a service as systemd does. Raises AssertionError where it does not end by itself."""
        self._running[name].stop()

    def freeze(self, name: str, seconds: float) -> None:
        """Freeze a service, as on a machine that swaps."""
        process = self._running[name].process
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            process.send_signal(signal.SIGCONT)

    def kill_engine(self, name: str) -> bool:
        """End the engine process of a service, whose front starts another; return whether it had one."""
        try:
            front = psutil.Process(self._running[name].process.pid)
            engines = [child for child in front.children() if any(".engine" in part for part in child.cmdline())]
        except psutil.Error:
            return False
        for engine in engines:
            engine.kill()
        return bool(engines)

    def processes(self) -> Mapping[str, Sequence[psutil.Process]]:
        """Return each running service's own process and those that it has started."""
        found = {}
        for name, service in list(self._running.items()):
            try:
                own = psutil.Process(service.process.pid)
                found[name] = [own, *own.children(recursive=True)]
            except psutil.Error:
                continue
        return found

    def completed(self) -> Iterator[str]:
        """Yield the request_id of each job that a gateway has logged as completed, as often as it has."""
        for gateway in self._lives["gateway"]:
            for line in gateway.events():
                if line.get("event") == "job completed":
                    yield str(line.get("request_id", ""))

    def _configuration(self, name: str) -> tuple[str, Mapping[str, object]]:
        """Return kind and configuration of a service."""
        joined: dict[str, object] = {"name": name, "gateway": self.fleet_address, "server": FREE_PORTS}
        if name == "gateway":
            server = {"listen": self.address, "metrics_listen": "127.0.0.1:0"}
            where = {"server": server, "fleet": {"listen": self.fleet_address}, "state": str(self.state / name)}
            return name, {**_GATEWAY, **where}
        if name in _STORES:
            return name, {**joined, "folder": str(self.state / name), **_STORES[name]}
        if name == _CONTROLNET:
            nets = {net: str(WEIGHTS / "controlnets" / net) for net in CONTROLNETS}
            catalogue = str(self.state / f"{name}.db")
            return kinds.CONTROLNET, {**joined, "engine": {"threads": 1}, "controlnets": nets, "catalogue": catalogue}
        return kinds.WORKER, worker_config(self.fleet_address, name=name, engine=_ENGINE)

    def _joined(self) -> set[str]:
        with Client(self.address, fleet_address=self.fleet_address, timeout_s=_CALL_S) as client:
            return {member.name for member in client.fleet().members}

    def _set_profile(self) -> None:
        """Make pictures start from cached latents."""
        enough = SkipProfile(classes=(LengthClass(max_words=math.inf, thresholds={_FRACTION: -1.0}),))
        with Client(self.address, fleet_address=self.fleet_address, timeout_s=_CALL_S) as client:
            wait_until(lambda: bool(client.models()), "a model", within_s=JOIN_S)
            (model,) = client.models()
            client.set_cache_profile(CacheProfile(model_hash=model.model_hash, balanced=enough, fast=enough))

    def _stop(self) -> None:
        for service in self._running.values():
            if service.process.poll() is None:
                service.process.send_signal(signal.SIGCONT)  # a frozen one cannot end
        self._services.stop()
