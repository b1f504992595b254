"""The manifest of services, in the order in which they start, and what each declares of itself as a `ServiceSpec`.

A line of `services.txt` names a Python module with a `SPEC` in it; "#" begins a comment. Services that are not part of
Bottega are listed in manifests of their own, whose paths are in BOTTEGA_SERVICES. `bottega up`, its supervisor, doctor
and systemd start and watch a service by its spec.
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
    """An identifier; the command line shows it with dashes."""
    help: str
    default: int
    least: int = 0
    most: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteSettings:
    """Settings that all processes of a suite on one machine share."""

    address: str
    """host:port of the gateway, like metrics_address and fleet_address."""
    metrics_address: str
    fleet_address: str
    """The address at which services join the fleet."""
    model: str
    """"miniature", or the absolute path of a folder in Diffusers' layout."""
    model_name: str
    """Name under which workers serve the model."""
    model_folder: Path
    """Folder of the model, also of the embedded one."""
    device: str
    dtype: str
    threads: int
    """Requested threads of each worker; 0 divides `cores` among the workers."""
    cores: int
    drain_grace_s: float
    state: Path
    """Folder below which services keep persistent files."""
    options: Mapping[str, int]
    """The options of all services, by name."""

    @property
    def server(self) -> dict[str, object]:
        """The `server` section of a service's configuration."""
        return {"drain_grace_s": self.drain_grace_s}

    def threads_of(self, processes: int, *, beside: int = 0) -> int:
        """Return the threads of each of `processes` that share the cores with `beside` times as many others."""
        return self.threads or max(1, self.cores // (1 + beside) // max(1, processes))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSettings:
    """The parts of a service's systemd unit that not all services have."""

    on_device: bool = False
    """Whether it computes with torch, on a device."""
    links: bool = False
    """Whether services of the same machine that run as other users open links to it."""
    tenants: bool = False
    """Whether it reads the tenants file, which only root may write.

    Must not be set together with `links`: each needs its own group, and a unit has only one.
    """
    reads_models: bool = False
    """Whether it reads models, which may lie in a home folder."""
    start_s: int = 0
    """Seconds in which it must become ready or extend its start; 0 for systemd's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A service of the suite."""

    kind: str
    """Kind with which it joins the fleet; also the name of its process, its state folder and its unit."""
    title: str
    """Name for users."""
    module: str
    """`python -m MODULE --config FILE` starts it."""
    configure: Callable[[SuiteSettings, str], Mapping[str, object]]
    """Returns its configuration in a suite on one machine, given the process's name."""
    config: str = ""
    """Its configuration's dataclass, "MODULE:CLASS"; "" hides it from `bottega config`."""
    config_check: str = ""
    """"MODULE:FUNCTION", or "".

    It raises ConfigError for a configuration that names something unusable on this machine.
    """
    example: Mapping[str, object] = field(default_factory=dict)
    """Settings of the configuration that is installed with its unit. The other keys appear there as comments."""
    count: ServiceOption | None = None
    """The option with the number of its processes, whose names are numbered; None means exactly one."""
    options: tuple[ServiceOption, ...] = ()
    """Further options."""
    joins: bool = True
    """Whether it is ready only when it has joined the fleet, instead of as soon as it serves."""
    folders: tuple[str, ...] = ()
    """Names of folders below the state that it uses besides its own."""
    requires: tuple[str, ...] = ()
    """Distributions that it imports, and that a machine without it need not have."""
    install: str = ""
    """The requirement that makes `pip install` install all of them."""
    add_on: str = ""
    """"MODULE:FUNCTION" of the gateway's part, or "".

    It makes an AddOn from an AddOnContext (bottega.addons.interface.gateway_addon), for jobs that use this service.
    """
    engine_add_on: str = ""
    """"MODULE:FUNCTION" of the part in workers' engines, or "".

    It makes an EngineAddOn of this kind from an EngineAddOnContext (bottega.addons.interface.engine_context).
    """
    front_add_on: str = ""
    """"MODULE:CLASS" of the part in workers' fronts, or "".

    It is a FrontAddOn of this kind (bottega.addons.interface.front_addon).
    """
    unit: UnitSettings = field(default_factory=UnitSettings)

    def names(self, options: Mapping[str, int]) -> list[str]:
        """Return the names of its processes."""
        if self.count is None:
            return [self.kind]
        return [f"{self.kind}-{number}" for number in range(options[self.count.name])]


def read_services() -> tuple[ServiceSpec, ...]:
    """Return the services that a suite of this machine has.

    Raises:
        ServicesMissing: Bottega's own are not installed.
        ConfigError: A manifest cannot be used; it names the line.
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
    """Return the object that a spec names as "MODULE:NAME". Raises ConfigError."""
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
            raise ConfigError(f"{where}: {spec.kind!r} is no name for a kind of service, or another one has it")
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
                "pip install 'bottega-services[activations,cache,controlnet,gateway,loras,worker]'"
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
