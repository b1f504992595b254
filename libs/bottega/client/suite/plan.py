"""Which processes make a suite on this machine, and how each is configured. Plans only; starts nothing."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from bottega import rules
from bottega.client.suite.state import StateFolder
from bottega.client.transport.address import DEFAULT_PORT
from bottega.errors import BottegaError, Code
from bottega.miniature import WEIGHTS

GATEWAY = "gateway"
LORAS = "loras"

# People who press Ctrl-C wait for it; the services' own default is for machines in production.
_DRAIN_GRACE_S = 5.0


class PortTaken(BottegaError):
    """Something else listens where the gateway should."""

    code = Code.FAILED_PRECONDITION


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """What somebody wants to run.

    controlnet_servers: each hosts the ControlNets in the model's own folder `controlnets`, if it has one, and those
    that are added.
    model: "miniature" or a folder in Diffusers' layout. The LoRA store has those in its folder `loras`.
    threads: of each worker; 0 divides the cores over the workers. ControlNet servers share them as one more worker.
    port: of the gateway; the next one is for its metrics, the one after that for the fleet. 0 takes any three.
    """

    workers: int = 1
    controlnet_servers: int = 1
    model: str = "miniature"
    device: str = "auto"
    dtype: str = "float32"
    threads: int = 0
    port: int = DEFAULT_PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process to keep running. Its stdin ends when whoever keeps it dies, and then it should end too.

    environment: what differs from our own.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """The processes of a suite, the gateway first. workers, controlnet_servers: how many of them join it.

    address: of the gateway, for those who want pictures. fleet_address: of its listener for services.
    """

    address: str
    fleet_address: str
    workers: int
    controlnet_servers: int
    threads: int
    services: tuple[ProcessPlan, ...]


def plan_suite(wish: SuiteOptions, state: StateFolder) -> SuitePlan:
    """Writes every service's configuration to the state folder and says how to start them."""
    port, metrics_port, fleet_port = _ports(wish.port)
    address, fleet = f"127.0.0.1:{port}", f"127.0.0.1:{fleet_port}"
    cores = len(os.sched_getaffinity(0))
    threads = wish.threads or max(1, cores // wish.workers)
    beside = wish.threads or max(1, cores // (wish.workers + 1) // max(1, wish.controlnet_servers))
    server = {"listen": address, "metrics_listen": f"127.0.0.1:{metrics_port}", "drain_grace_s": _DRAIN_GRACE_S}
    values = {"server": server, "fleet": {"listen": fleet}, "state": str(state.gateway)}
    gateway = _service(GATEWAY, "bottega.gateway", values, state.config)
    loras = _service(LORAS, "bottega.loras", _store(wish, fleet, state), state.config)
    workers = [_worker(f"worker-{n}", wish, fleet, threads, state) for n in range(wish.workers)]
    nets = [_controlnet(f"controlnet-{n}", wish, fleet, beside, state) for n in range(wish.controlnet_servers)]
    return SuitePlan(
        address=address,
        fleet_address=fleet,
        workers=wish.workers,
        controlnet_servers=wish.controlnet_servers,
        threads=threads,
        services=(gateway, loras, *workers, *nets),
    )


def _worker(name: str, wish: SuiteOptions, gateway: str, threads: int, state: StateFolder) -> ProcessPlan:
    model = wish.model if wish.model == "miniature" else str(Path(wish.model).resolve())
    values = {
        "name": name,
        "gateway": gateway,
        "server": {"drain_grace_s": _DRAIN_GRACE_S},
        "engine": {"model": model, "device": wish.device, "dtype": wish.dtype, "threads": threads},
    }
    return _service(name, "bottega.worker", values, state.config)


def _controlnet(name: str, wish: SuiteOptions, gateway: str, threads: int, state: StateFolder) -> ProcessPlan:
    folder = WEIGHTS if wish.model == "miniature" else Path(wish.model).resolve()
    values = {
        "name": name,
        "gateway": gateway,
        "server": {"drain_grace_s": _DRAIN_GRACE_S},
        "engine": {"device": wish.device, "dtype": wish.dtype, "threads": threads},
        "controlnets": dict(_own_controlnets(folder)),
        "root": str(state.controlnets),
        "catalogue": str(state.root / "controlnet" / f"{name}.json"),
    }
    return _service(name, "bottega.controlnet", values, state.config)


def _own_controlnets(model: Path) -> Iterator[tuple[str, str]]:
    """Name and folder of those that lie in a model's folder."""
    for config in sorted((model / "controlnets").glob("*/config.json")):
        if rules.is_adapter_name(config.parent.name):
            yield config.parent.name, str(config.parent)


def _store(wish: SuiteOptions, gateway: str, state: StateFolder) -> dict[str, object]:
    """Of the LoRA store: LoRAs are for the model that the workers serve, by its name."""
    folder = WEIGHTS if wish.model == "miniature" else Path(wish.model).resolve()
    base = wish.model if wish.model == "miniature" else folder.name
    return {
        "name": LORAS,
        "gateway": gateway,
        "server": {"drain_grace_s": _DRAIN_GRACE_S},
        "folder": str(state.root / LORAS),
        "bases": {base: str(folder)},
        "loras": {name: {"path": path, "base": base} for name, path in _own_loras(folder)},
    }


def _own_loras(model: Path) -> Iterator[tuple[str, str]]:
    """Name and path of those that lie in a model's folder: files, or folders with one."""
    for path in sorted((model / "loras").glob("*")):
        name = path.name if path.is_dir() else path.stem
        if (path.is_dir() or path.suffix == ".safetensors") and rules.is_adapter_name(name):
            yield name, str(path)


def _service(name: str, module: str, values: Mapping[str, object], config: Path) -> ProcessPlan:
    path = config / f"{name}.yaml"
    path.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
    return ProcessPlan(
        name=name,
        argv=(sys.executable, "-m", module, "--config", str(path), "--stop-with-stdin"),
        # Without it the threads of two torch processes on few cores starve each other, up to 80-fold.
        environment={"OMP_WAIT_POLICY": "PASSIVE"},
    )


def _ports(port: int) -> tuple[int, int, int]:
    """The gateway's port, the one of its metrics and the fleet's: `port` and the two after it, or any three if it is 0.

    All are free now. Raises PortTaken.
    """
    try:
        with (
            socket.create_server(("127.0.0.1", port)) as first,
            # Whoever takes any port may well be given the neighbour of one that somebody else has.
            socket.create_server(("127.0.0.1", port and port + 1)) as second,
            socket.create_server(("127.0.0.1", port and port + 2)) as third,
        ):
            return first.getsockname()[1], second.getsockname()[1], third.getsockname()[1]
    except OSError as error:
        raise PortTaken(f"port {port} or one of the two after it cannot be used: {error.strerror}") from None
