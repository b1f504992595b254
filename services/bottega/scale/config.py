"""The configuration of a scaler."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega import kinds
from bottega.errors import ConfigError
from bottega.rpc.server_config import MemberConfig
from bottega.rules import MAX_MODEL_CHARACTERS
from bottega.strict import STRICT

Seconds = Annotated[float, Field(gt=0)]
# Characters of the name of a unit's instance that need no escape.
_INSTANCE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Services of one kind and model on this host."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kind: Literal["worker", "encode", "decode", "controlnet"] = "worker"
    """Kind of the services: encode and decode are workers with only this role."""
    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARACTERS)]
    """Name in requests of the model that the workers serve, or that the ControlNets are for."""
    minimum: Annotated[int, Field(ge=0)] = 1
    """Least number of services that run. With 0, the first job waits until a worker has started."""
    instances: Annotated[tuple[str, ...], Field(min_length=1, max_length=256)]
    """Instances that may run, in the order in which they are started: NAME is the unit bottega-worker@NAME.

    Its configuration is workers/NAME.yaml in `folder`, where it has its device, and no name or one of its own.
    """

    def __post_init__(self) -> None:
        for name in self.instances:
            if not _INSTANCE.fullmatch(name):
                raise ValueError(f"{name!r} is no name of an instance: use letters, digits, _, - and .")
        if len(set(self.instances)) < len(self.instances):
            raise ValueError("instances must be without duplicates")
        if self.minimum > len(self.instances):
            raise ValueError(f"minimum is {self.minimum}, but there are {len(self.instances)} instances")
        if self.kind == "controlnet" and self.minimum == 0:
            raise ValueError("minimum must be at least 1: a ControlNet is known only while a server hosts it")
        if self.kind in kinds.STAGES and self.minimum == 0:
            raise ValueError(
                f"minimum must be at least 1: jobs wait while no worker with the role {self.kind} is there"
            )

    def unit(self, instance: str) -> str:
        """Return the name of an instance's unit."""
        return f"bottega-{self.service}@{instance}.service"

    @property
    def service(self) -> str:
        """The service that each instance runs: a worker whatever its role, or a ControlNet server."""
        return kinds.WORKER if self.kind in kinds.STAGES else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleConfig(MemberConfig):
    """The configuration of a scaler."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    manager: Literal["systemd", "processes"] = "systemd"
    """systemd: start and stop units. processes: run the services as child processes, which end with the scaler."""
    folder: str = "/etc/bottega"
    """Folder of the services' configurations: workers/NAME.yaml and controlnets/NAME.yaml."""
    pools: tuple[PoolConfig, ...] = ()
    """The services that may run on this host, each kind and model once.

    kind: worker (the default), controlnet, or encode or decode for workers with only this role. model: its name in
    requests. minimum: how many run at least, by default 1; 0 lets the first job wait for a start. instances: the units
    that may run, in this order: NAME is bottega-worker@NAME, whose configuration, workers/NAME.yaml, names its device
    and must not share its name.
    """
    start_limit_s: Seconds = 900.0
    """Seconds after which a service that is not ready has failed to start."""
    first_retry_s: Seconds = 10.0
    """Seconds after which a failed start is tried again, with another instance before that if there is one.

    Each further failure doubles them.
    """
    max_retry_s: Seconds = 600.0
    """Upper bound on the seconds between two starts that fail."""

    def __post_init__(self) -> None:
        keys = [(pool.kind, pool.model) for pool in self.pools]
        if len(set(keys)) < len(keys):
            raise ValueError("pools: each kind and model must be there once")
        units = [pool.unit(name) for pool in self.pools for name in pool.instances]
        if doubles := sorted({unit for unit in units if units.count(unit) > 1}):
            raise ValueError(f"pools: {doubles[0]} is in several pools")

    def file_of(self, pool: PoolConfig, instance: str) -> Path:
        """Return the path of an instance's configuration."""
        return Path(self.folder) / f"{pool.service}s" / f"{instance}.yaml"


def check_configuration(config: ScaleConfig) -> None:
    """Raise ConfigError if there are no pools, no gateway, or no configuration of an instance in the folder.

    A folder that does not exist yet is not checked: another machine may have it.
    """
    if not config.gateway:
        raise ConfigError("gateway: a scaler needs the address of the gateway's fleet listener")
    if not config.pools:
        raise ConfigError("pools: name at least one pool; the installed scale.yaml has an example")
    if Path(config.folder).is_dir():
        check_instances(config)


def check_instances(config: ScaleConfig) -> None:
    """Raise ConfigError if the configuration of an instance is missing."""
    for pool in config.pools:
        for instance in pool.instances:
            path = config.file_of(pool, instance)
            if not path.is_file():
                raise ConfigError(f"pools: {path}, the configuration of {pool.unit(instance)}, is missing")
