"""The declaration of a service for `bottega up`, its supervisor, doctor and systemd, which start and watch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOption:
    """A number that `bottega up` takes for a service."""

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
    """The requested number; 0 divides `cores`."""
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
    """Whether it reads root's file of tenants. Not together with links, because a unit has one group."""
    reads_models: bool = False
    """Whether it reads models, which may lie in a home folder."""
    start_s: int = 0
    """Seconds to become ready or to ask for more time; 0 is systemd's default."""


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
    unit: UnitSettings = field(default_factory=UnitSettings)

    def names(self, options: Mapping[str, int]) -> list[str]:
        """Return the names of its processes."""
        if self.count is None:
            return [self.kind]
        return [f"{self.kind}-{number}" for number in range(options[self.count.name])]
