"""What a service declares for `bottega up`, its supervisor, doctor and systemd, which start and watch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOption:
    """A number that `bottega up` takes for a service. name: an identifier; the command line has dashes in it."""

    name: str
    help: str
    default: int
    least: int = 0
    most: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteSettings:
    """What all processes of a suite on one machine have in common.

    address, metrics_address, fleet_address: host:port where the gateway listens; services join it at the last one.
    model: "miniature" or the absolute path of a folder in Diffusers' layout. model_name: by which workers serve it.
    model_folder: where it lies, the embedded one too. threads: that were asked for; 0 divides `cores`.
    state: folder below which services keep what outlives them. options: every service's, by name.
    """

    address: str
    metrics_address: str
    fleet_address: str
    model: str
    model_name: str
    model_folder: Path
    device: str
    dtype: str
    threads: int
    cores: int
    drain_grace_s: float
    state: Path
    options: Mapping[str, int]

    @property
    def server(self) -> dict[str, object]:
        """The `server` section of a service's configuration."""
        return {"drain_grace_s": self.drain_grace_s}

    def threads_of(self, processes: int, *, beside: int = 0) -> int:
        """Threads of each of `processes` that share the cores with as many more as `beside` says."""
        return self.threads or max(1, self.cores // (1 + beside) // max(1, processes))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSettings:
    """What a service's systemd unit has beyond those of all services.

    on_device: it computes with torch, on a device. links: services of the same machine, which are other users, open
    links to it. tenants: it reads the file of tenants that root writes; not together with links, as a unit has one
    group. reads_models: they may lie in a home. start_s: for it to become ready, or to ask for more time; 0 is
    systemd's default.
    """

    on_device: bool = False
    links: bool = False
    tenants: bool = False
    reads_models: bool = False
    start_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A service of the suite.

    kind: with which it joins the fleet; its process, its folder below the state and its unit have the same name.
    title: for people. module: `python -m MODULE --config FILE` starts it.
    config: its configuration's dataclass, "MODULE:CLASS"; empty: `bottega config` knows nothing of it.
    config_check: "MODULE:FUNCTION", which raises ConfigError for a configuration with which the service would not start
    because of what it names on this machine; empty: there is nothing of that kind.
    example: what the configuration sets that is installed with its unit; the other keys stand there as comments.
    configure: its configuration in a suite on one machine; the second argument is the process's name.
    count: the option that says how many there are, and their names are numbered; None: always one.
    options: further ones. joins: it is ready when it has joined the fleet, else as soon as it serves.
    folders: names below the state that it uses besides its own. requires: distributions that it imports, and that a
    machine without it need not have. install: what `pip install` is given for all of them.
    add_on: what the gateway does for jobs with it: "MODULE:FUNCTION", which makes an AddOn from an AddOnContext
    (bottega.gateway.addons.addon); empty: nothing. engine_add_on: what the engines of workers do for them, likewise: it
    makes an EngineAddOn of this kind from an EngineAddOnContext (bottega.worker.engine.addons).
    """

    kind: str
    title: str
    module: str
    configure: Callable[[SuiteSettings, str], Mapping[str, object]]
    config: str = ""
    config_check: str = ""
    example: Mapping[str, object] = field(default_factory=dict)
    count: ServiceOption | None = None
    options: tuple[ServiceOption, ...] = ()
    joins: bool = True
    folders: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    install: str = ""
    add_on: str = ""
    engine_add_on: str = ""
    unit: UnitSettings = field(default_factory=UnitSettings)

    def names(self, options: Mapping[str, int]) -> list[str]:
        """Names of its processes."""
        if self.count is None:
            return [self.kind]
        return [f"{self.kind}-{number}" for number in range(options[self.count.name])]
