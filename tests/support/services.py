"""Real services as processes of their own, for tests and benches: started, waited for, ended by process id."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from bottega.manifest import read_services
from bottega.process.fork_server import ForkOrder
from tests.support.forked_services import ForkedService, may_be_forked

# A worker of the miniature is warm in 7 s with free cores; tests share theirs.
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.02

# Where a service listens of which only its log says where.
FREE_PORTS: Mapping[str, object] = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"}

# Codec processes start with the first image: many tests send none, and each process imports for .2 s.
CODEC_ON_DEMAND: Mapping[str, object] = {"codec_idle_s": 600.0}

# A worker's engine beside tests. One thread: the tests' own torch has the other core. An engine measures turns of
# every width that it may have before it serves: those of more than 4 rows take a second, and no test here needs them.
SMALL_ENGINE: Mapping[str, object] = {"model": "miniature", "threads": 1, "max_rows": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service: `address` and `metrics` are host:port, `log` is what it wrote to stderr.

    fleet: of a gateway, where services join it.
    """

    name: str
    process: subprocess.Popen[bytes] | ForkedService
    address: str
    metrics: str
    log: Path
    fleet: str = ""

    def stop(self) -> int:
        """Asks it to end, and ends it after a while; returns its exit code. Harmless when it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end within {STOP_TIMEOUT_S:.0f} s\n{tail(self.log)}") from None

    def kill(self) -> None:
        """Ends it now, as a crash would."""
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)

    def events(self) -> list[dict[str, Any]]:
        """The lines that it has logged so far."""
        return _events(self.log)


class Services:
    """Starts services in one folder and stops all of them at the end, the last one first.

    start_s: that each may take until it serves.
    """

    def __init__(self, folder: Path, *, start_s: float = START_TIMEOUT_S) -> None:
        self._folder = folder
        self._start_s = start_s
        self._running: list[Service] = []
        self._started = 0

    def __enter__(self) -> Services:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self, kind: str, config: Mapping[str, object], *, name: str = "", run_by: Sequence[str] = ()) -> Service:
        """Starts a service with this configuration and returns when it serves.

        kind: of a service in the manifest, or a module that is none of them. name: of its files; one of the same name,
        started later, has the same state. run_by: a command that becomes it, such as prlimit.
        """
        self._started += 1
        name = name or f"{kind}-{self._started}"
        path = self._folder / f"{name}.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")  # every JSON text is YAML
        log = self._folder / f"{name}.log"
        environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "PASSIVE",
            "BOTTEGA_STATE": str(self._folder / f"{name}.state"),
        }
        process = _start(kind, path, log, environment, run_by)
        try:
            serving = wait_until_serving(process, log, self._start_s)
        except BaseException:
            process.kill()
            process.wait(STOP_TIMEOUT_S)
            raise
        service = Service(
            name=name,
            process=process,
            log=log,
            address=serving["address"],
            metrics=serving["metrics"],
            fleet=serving.get("fleet", ""),
        )
        self._running.append(service)
        return service

    def stop(self) -> None:
        """Stops what still runs; raises when one does not end by itself, after having ended all."""
        failures: list[AssertionError] = []
        for service in reversed(self._running):
            try:
                service.stop()
            except AssertionError as failure:
                failures.append(failure)
        self._running.clear()
        if failures:
            raise failures[0]


def _start(
    kind: str, config: Path, log: Path, environment: Mapping[str, str], run_by: Sequence[str]
) -> subprocess.Popen[bytes] | ForkedService:
    """Start a service, as a fork if it may be one."""
    spec = next((service for service in read_services() if service.kind == kind), None)
    module, arguments = spec.module if spec else kind, ("--config", str(config))
    with log.open("wb") as output:
        if spec and spec.fork_after_importing and not run_by and may_be_forked():
            order = ForkOrder(
                module=module,
                arguments=arguments,
                environment=environment,
                folder=str(Path.cwd()),
                imports=spec.fork_after_importing,
            )
            return ForkedService(order, output)
        return subprocess.Popen(
            [*run_by, sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        )


def gateway_config(**overrides: object) -> dict[str, object]:
    """Configuration of a gateway on free ports. What is asked for twice is drawn twice: whoever compares wants that."""
    own = {"server": FREE_PORTS, "fleet": {"listen": "127.0.0.1:0"}, "identical_results": False}
    return {**own, **CODEC_ON_DEMAND, **overrides}


def worker_config(gateway: str, *, name: str, engine: Mapping[str, object], **overrides: object) -> dict[str, object]:
    """Configuration of a worker of the gateway whose fleet listener is at `gateway`, on free ports."""
    own = {"name": name, "gateway": gateway, "server": FREE_PORTS, "engine": dict(engine)}
    return {**own, **CODEC_ON_DEMAND, **overrides}


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one that has may be left for init to collect."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.is_running())
    except psutil.NoSuchProcess:
        return False


def tail(log: Path) -> str:
    """The end of a log, for a message."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])


def wait_until_serving(
    process: subprocess.Popen[bytes] | ForkedService, log: Path, start_s: float = START_TIMEOUT_S
) -> dict[str, Any]:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        for event in _events(log):
            if event.get("event") == "serving":
                return event
        if process.poll() is not None:
            raise AssertionError(f"{log.stem} ended with {process.returncode} before it served\n{tail(log)}")
        time.sleep(_POLL_S)
    raise AssertionError(f"{log.stem} did not serve within {start_s:.0f} s\n{tail(log)}")


def _events(log: Path) -> list[dict[str, Any]]:
    """Whole JSON lines of a log that may still be written to."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]
