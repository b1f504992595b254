"""The manifest of services, in the order in which they start, with a `ServiceSpec` for each.

A line of `services.txt` names a Python module that has a `SPEC`; "#" begins a comment. Services that are not part of
Bottega are listed in manifests of their own, whose paths are in BOTTEGA_SERVICES. `bottega up`, its supervisor, doctor
and systemd start and watch a service according to its spec.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from bottega.errors import ConfigError, ServicesMissing
from bottega.kinds import is_kind

MANIFEST = Path(__file__).with_name("services.txt")
"""The manifest of Bottega's own services."""

VARIABLE = "BOTTEGA_SERVICES"
"""Environment variable with the manifests of other services, separated like the paths in PATH."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOption:
    """A numeric option of `bottega up` for a service, such as the number of its processes."""

    name: str
    """Name of the option, an identifier; the command line shows it with dashes."""
    help: str
    default: int
    least: int = 0
    most: int = 64
    per_model: bool = False
    """Whether the value is for each model of a suite, whose settings then have the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteModel:
    """A model that a suite on one machine serves."""

    source: str
    """Name of an embedded model, or the absolute path of a folder in Diffusers' layout."""
    name: str
    """Name under which workers serve it."""
    folder: Path
    """Its folder, also if it is an embedded one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteSettings:
    """Settings that all processes of a suite on one machine share."""

    address: str
    """host:port of the gateway."""
    metrics_address: str
    fleet_address: str
    """The address at which services join the fleet."""
    http_address: str
    """The address of the HTTP API."""
    models: tuple[SuiteModel, ...]
    """At least one, with different names."""
    vae: str
    """Absolute path of the folder of a VAE in place of the only model's own; empty for none."""
    device: str
    dtype: str
    threads: int
    """CPU threads of each worker; 0 divides `cores` among the workers."""
    cores: int
    drain_grace_s: float
    state: Path
    """Folder in which each service has a folder for persistent files."""
    options: Mapping[str, int]
    """The options of all services, by name."""

    @property
    def server(self) -> dict[str, object]:
        """The `server` section of every service's configuration."""
        return {"drain_grace_s": self.drain_grace_s}

    def threads_of(self, processes: int, *, beside: int = 0) -> int:
        """Return the CPU threads of each of `processes` processes, if `beside` times as many others share the cores."""
        return self.threads or max(1, self.cores // (1 + beside) // max(1, processes))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSettings:
    """Properties of a service's systemd unit that differ between services."""

    on_device: bool = False
    """Whether the service computes with torch, on a CPU or GPU."""
    links: bool = False
    """Whether services on the same machine, which run as other users, open tensor connections to this one."""
    tenants: bool = False
    """Whether the service reads the file of tenants, which only root may write.

    Must not be set together with `links`: each needs its own group, and a unit has only one."""
    reads_models: bool = False
    """Whether the service reads models, which may be in a home folder."""
    starts_units: bool = False
    """Whether the service starts and stops other units, which only root may do."""
    start_s: int = 0
    """Seconds in which the service must become ready or extend its start; 0 for systemd's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """The declaration of a service: how it is started, configured and installed, and which add-ons it has."""

    kind: str
    """Kind of the service in the fleet; also the name of its process, its state folder and its unit."""
    title: str
    """What the service is called in texts for users, such as "LoRA store"."""
    module: str
    """Module that starts the service: `python -m MODULE --config FILE`."""
    configure: Callable[[SuiteSettings, str], Mapping[str, object]]
    """Returns the configuration for a suite on one machine. The second argument is the name of the process."""
    config: str = ""
    """Dataclass of the configuration, "MODULE:CLASS"; "" hides the service from `bottega config`."""
    config_check: str = ""
    """Function that checks a configuration, "MODULE:FUNCTION"; "" for none.

    It raises ConfigError for a configuration that names something unusable on this machine."""
    example: Mapping[str, object] = field(default_factory=dict)
    """Settings in the configuration file that is installed with the unit. The file shows other keys as comments."""
    fork_after_importing: str = ""
    """Module that `bottega up` imports before it forks the service; see bottega.process.fork_server.

    Importing it must not start threads. "" starts the service as a new interpreter."""
    in_suite: bool = True
    """Whether `bottega up` starts the service."""
    count: ServiceOption | None = None
    """Option with the number of processes, whose names are numbered; None if there is exactly one."""
    options: tuple[ServiceOption, ...] = ()
    """Further options."""
    joins: bool = True
    """Whether the service is ready only after it has joined the fleet, and not as soon as it serves."""
    folders: tuple[str, ...] = ()
    """Names of folders in the state folder that the service uses besides its own."""
    requires: tuple[str, ...] = ()
    """Distributions that the service imports, and that machines without the service need not have."""
    optional: bool = False
    """Whether `bottega up` starts the suite without the service if a distribution in `requires` is missing."""
    install: str = ""
    """Requirement for `pip install` that installs all of `requires`."""
    add_on: str = ""
    """Function that makes the gateway's add-on, "MODULE:FUNCTION"; "" for none.

    It makes an AddOn from an AddOnContext (bottega.addons.interface.gateway_addon), for jobs that use this service."""
    engine_add_on: str = ""
    """Function that makes the add-on of workers' engines, "MODULE:FUNCTION"; "" for none.

    It makes an EngineAddOn of this kind from an EngineAddOnContext (bottega.engine.addon)."""
    front_add_on: str = ""
    """Class of the add-on of workers' front processes, "MODULE:CLASS"; "" for none.

    It is a FrontAddOn of this kind (bottega.addons.interface.front_addon)."""
    unit: UnitSettings = field(default_factory=UnitSettings)

    def names(self, options: Mapping[str, int]) -> list[str]:
        """Return the names of the service's processes in a suite on one machine."""
        if not self.in_suite:
            return []
        if self.count is None:
            return [self.kind]
        return [f"{self.kind}-{number}" for number in range(options[self.count.name])]


def read_services() -> tuple[ServiceSpec, ...]:
    """Return the services of the manifests on this machine.

    Raises:
        ServicesMissing: Bottega's own services are not installed.
        ConfigError: A manifest cannot be used; the error names the line.
    """
    others = os.environ.get(VARIABLE, "").split(os.pathsep)
    return _read((MANIFEST, *(Path(path) for path in others if path)))


def options_of(services: tuple[ServiceSpec, ...]) -> Iterator[ServiceOption]:
    """Yield the options that `bottega up` offers for these services."""
    for service in services:
        if service.count:
            yield service.count
        yield from service.options


def missing_packages(service: ServiceSpec) -> list[str]:
    """Return the distributions that a service requires but that are not installed."""
    return [name for name in service.requires if not _is_installed(name)]


def load_object(path: str) -> Any:
    """Return the object that a spec names as "MODULE:NAME". Raise ConfigError if it cannot be imported."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - a module of another project may raise anything
        raise ConfigError(f"{path}, which a service's spec names, cannot be imported: {error}") from None


@functools.lru_cache
def _read(manifests: tuple[Path, ...]) -> tuple[ServiceSpec, ...]:
    found: dict[str, ServiceSpec] = {}
    options: set[str] = set()
    for where, module in _lines(manifests):
        spec = _load(where, module)
        if not is_kind(spec.kind) or spec.kind in found:
            raise ConfigError(f"{where}: {spec.kind!r} is not a valid kind of service, or another service has it")
        named = {option.name for option in options_of((spec,))}
        if named & options:
            raise ConfigError(f"{where}: another service has the option {', '.join(sorted(named & options))} already")
        options |= named
        found[spec.kind] = spec
    return tuple(found.values())


def _lines(manifests: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    for manifest in manifests:
        try:
            lines = manifest.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the manifest {manifest} cannot be read: {error}") from None
        for number, line in enumerate(lines, 1):
            if module := line.partition("#")[0].strip():
                yield f"{manifest}, line {number}", module


def _load(where: str, module: str) -> ServiceSpec:
    try:
        spec = importlib.import_module(module).SPEC
    except ModuleNotFoundError as error:
        if where.startswith(f"{MANIFEST},") and error.name and f"{module}.".startswith(f"{error.name}."):
            raise ServicesMissing(
                "this needs bottega-services, which is not installed: "
                "pip install 'bottega-services[activations,cache,controlnet,gateway,http,loras,worker]'"
            ) from None
        raise ConfigError(f"{where}: {module} cannot be imported: {error}") from None
    except Exception as error:  # noqa: BLE001 - a module of another project may raise anything
        raise ConfigError(f"{where}: {module} cannot be imported: {error}") from None
    if not isinstance(spec, ServiceSpec):
        raise ConfigError(f"{where}: SPEC of {module} is no ServiceSpec")
    return spec


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
