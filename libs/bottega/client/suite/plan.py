"""Plans a suite on this machine from the manifest: its processes, their configurations and their ports."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from bottega.client.instance import StateFolder
from bottega.client.transport.connection import DEFAULT_PORT
from bottega.client.types.models import EMBEDDED_MODEL
from bottega.errors import BottegaError, Code, ConfigError
from bottega.manifest import ServiceSpec, SuiteModel, SuiteSettings, missing_packages, options_of, read_services
from bottega.miniature import MODELS

# Seconds of the services' drain. Their own default is longer: here a person waits after Ctrl-C.
_DRAIN_GRACE_S = 5.0


class PortTaken(BottegaError):
    """The error that another process listens on a port of the suite."""

    code = Code.FAILED_PRECONDITION


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """The options of `bottega up`."""

    models: tuple[str, ...] = (EMBEDDED_MODEL,)
    """Names of embedded models, or folders in Diffusers' layout; at least one."""
    model_names: tuple[str, ...] = ()
    """Names of the models in requests; an empty or missing one is what `bottega.model_files.name_of` returns."""
    vae: str = ""
    """Folder of a VAE in place of the only model's own; empty for none."""
    device: str = "auto"
    dtype: str = "auto"
    """The element type of the model: auto, float32, float16 or bfloat16; see a worker's `engine.dtype`."""
    threads: int = 0
    """CPU threads of each worker; 0 divides the cores by the number of workers."""
    port: int = DEFAULT_PORT
    """Port of the gateway. Its metrics, the fleet and HTTP use the next three ports. 0 chooses four free ports."""
    services: Mapping[str, int] = field(default_factory=dict)
    """Values of the options that services add, such as how many to start; missing ones have their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """A process to keep running. It should end when its stdin ends, which happens when its supervisor ends."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to add to the process's environment."""
    fork_after_importing: str = ""
    """Module to import before a fork becomes the process; "" for a new interpreter. See `ServiceSpec`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """The processes of a suite, in the order of the manifest."""

    settings: SuiteSettings
    """Settings that all services share."""
    processes: tuple[ProcessPlan, ...]
    counts: tuple[tuple[ServiceSpec, int], ...]
    """The number of processes of each service."""
    left_out: str = ""
    """Which optional services are not started, and what to install for them; "" for none."""

    @property
    def http_address(self) -> str:
        """The host:port of the HTTP API; "" if it is not started."""
        return self.settings.http_address if any(process.name == "http" for process in self.processes) else ""


def plan_suite(options: SuiteOptions, state: StateFolder) -> SuitePlan:
    """Write every service's configuration to the state folder, and return which processes to start.

    Raises:
        PortTaken: Another process uses a port.
        ConfigError: A package that a service needs is not installed, and the service is not optional.
    """
    services = read_services()
    settings = _settings(options, services, state)
    named = [(service, service.names(settings.options)) for service in services]
    lacking = [service for service, names in named if names and missing_packages(service)]
    if needed := [service for service in lacking if not service.optional]:
        raise ConfigError(_lacking_text(needed))
    named = [(service, names) for service, names in named if service not in lacking]
    return SuitePlan(
        settings=settings,
        processes=tuple(_process(name, service, settings, state.config) for service, names in named for name in names),
        counts=tuple((service, len(names)) for service, names in named),
        left_out=_lacking_text(lacking),
    )


def _lacking_text(services: list[ServiceSpec]) -> str:
    if not services:
        return ""
    needs = "; ".join(f"the {service.title} needs {', '.join(missing_packages(service))}" for service in services)
    install = " ".join(f"'{service.install}'" for service in services)
    return f"{needs}, not installed here: pip install {install}"


def _settings(options: SuiteOptions, services: tuple[ServiceSpec, ...], state: StateFolder) -> SuiteSettings:
    address, metrics_address, fleet_address, http_address = (f"127.0.0.1:{port}" for port in _ports(options.port))
    models = suite_models(options)
    return SuiteSettings(
        address=address,
        metrics_address=metrics_address,
        fleet_address=fleet_address,
        http_address=http_address,
        models=models,
        vae=str(Path(options.vae).resolve()) if options.vae else "",
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        cores=len(os.sched_getaffinity(0)),
        drain_grace_s=_DRAIN_GRACE_S,
        state=state.root,
        options={
            option.name: options.services.get(option.name, option.default) * (len(models) if option.per_model else 1)
            for option in options_of(services)
        },
    )


def suite_models(options: SuiteOptions) -> tuple[SuiteModel, ...]:
    """Return the models of a suite, with their names and folders."""
    # Imported here: it takes 0.2 s, for which every command would wait.
    from bottega.model_files.folder_check import folder_of, name_of

    found = []
    for source, name in zip_longest(options.models, options.model_names, fillvalue=""):
        folder = folder_of(source).resolve()
        absolute = source if source in MODELS else str(folder)
        found.append(SuiteModel(source=absolute, name=name_of(absolute, name), folder=folder))
    return tuple(found)


def _process(name: str, service: ServiceSpec, settings: SuiteSettings, folder: Path) -> ProcessPlan:
    import yaml  # every command that draws imports this module, for its error

    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(dict(service.configure(settings, name)), sort_keys=False), encoding="utf-8")
    return ProcessPlan(
        name=name,
        argv=(sys.executable, "-m", service.module, "--config", str(path), "--stop-with-stdin"),
        # Without it the threads of two torch processes on few cores starve each other, up to 80-fold.
        environment={"OMP_WAIT_POLICY": "PASSIVE"},
        fork_after_importing=service.fork_after_importing,
    )


def _ports(port: int) -> list[int]:
    """Return the ports of the gateway, its metrics, the fleet and HTTP: `port` and the next three, or free ones for 0.

    Raises PortTaken if one of them is in use.
    """
    if not port:
        return free_ports(4)
    ports = [port, port + 1, port + 2, port + 3]
    try:
        check_free(ports)
    except OSError as error:
        raise PortTaken(f"port {port} or one of the three after it cannot be used: {error.strerror}") from None
    return ports


# "first last": the range from which Linux assigns ports to sockets that ask for any, and to connections.
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Lower ports belong to well-known services.
_FIRST = 10_000
_TRIES = 100


def free_ports(count: int) -> list[int]:
    """Return free loopback ports, adjacent if possible, the first one chosen at random.

    They are outside the range from which the system assigns ports, so that no other process gets one before the service
    listens on it. If there are not enough free ports outside that range, the system assigns them.
    """
    last = _first_ephemeral_port() - count
    for _ in range(_TRIES if last >= _FIRST else 0):
        first = random.randint(_FIRST, last)
        ports = list(range(first, first + count))
        with suppress(OSError):
            check_free(ports)
            return ports
    return _assigned_ports(count)


def check_free(ports: Sequence[int]) -> None:
    """Raise OSError if one of these loopback ports is in use."""
    with ExitStack() as held:
        for port in ports:
            held.enter_context(socket.create_server(("127.0.0.1", port)))


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _assigned_ports(count: int) -> list[int]:
    with ExitStack() as held:
        found = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in found]
