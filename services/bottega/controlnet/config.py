"""The configuration of a ControlNet server and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega.config import DeviceName
from bottega.rpc.server_config import AtLeastOne, DeviceLinksConfig, MemberConfig, NotNegative, Seconds
from bottega.storage.objects import ObjectsAddress
from bottega.strict import STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetEngineConfig:
    """Settings of a ControlNet server's engine process."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    renamed_keys: ClassVar[Mapping[str, str]] = {
        "links_listen": "links.listen",
        "links_advertised": "links.advertised",
        "links_socket": "links.socket",
        "links_seal": "links.seal",
        "device_links": "links.devices",
    }

    device: DeviceName = "auto"
    """Device of the engine: auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of the computation, which must be that of the workers' models.

    auto: the data type of each worker; a ControlNet is then loaded once for each data type in use.
    """
    threads: NotNegative = 0
    """Number of torch's CPU threads. 0: torch decides."""
    exclusive_cores: bool = False
    """Whether the engine's CPU cores run nothing else.

    If so, its threads wait for each other actively, which is faster, but slower if the cores are shared.
    """
    device_memory_mib: NotNegative = 0
    """Upper bound in MiB on the device memory of ControlNets, forward passes and connections together.

    0: the memory that is free when the engine starts, less a reserve. On a CPU it must be 0.
    """
    device_memory_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Maximum share of the GPU's memory that the engine may use, if device_memory_mib is 0."""
    budget_bytes: AtLeastOne = 8 << 30
    """Upper bound on the bytes of loaded weights; three quarters of the device's memory if that is less."""
    max_rows: AtLeastOne = 16
    """Upper bound on the batch rows of one forward pass. A guided step has two for each image."""
    fixed_rows: NotNegative = 0
    """Number of batch rows of every forward pass; smaller ones are padded.

    Images are then equal byte for byte whatever runs beside them. 0: off.
    """
    links: DeviceLinksConfig = field(default_factory=DeviceLinksConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetConfig(MemberConfig):
    """The configuration of a ControlNet server."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    renamed_keys: ClassVar[Mapping[str, str]] = {"start_s": "start_stall_s"}

    engine: ControlNetEngineConfig = field(default_factory=ControlNetEngineConfig)
    engine_on_demand: bool = False
    """Whether the engine starts with the first request that needs it, which waits meanwhile.

    false: it starts with the server. An idle engine takes 350 MiB. If callers have added ControlNets, the engine always
    starts with the server.
    """
    controlnets: dict[str, str] = field(default_factory=dict)
    """Folders of hosted ControlNets in Diffusers' layout, by name.

    miniature/edges and miniature/layout are the ControlNets of the small model that comes with Bottega.
    """
    left_out: dict[str, str] = field(default_factory=dict)
    """ControlNets that are not hosted, by name, with the reasons.

    The fleet lists them. `bottega up` writes here which files beside the ControlNets of a model's folder it cannot use.
    """
    root: str = ""
    """Folder that must contain the folders that callers add. Empty: callers cannot add ControlNets."""
    catalogue: str = ""
    """SQLite file of added ControlNets and measured profiles.

    Only one server at a time may use it. Empty: controlnets.db in Bottega's state folder.
    """
    database: str = ""
    """URL of a PostgreSQL database (15 or newer) with the ControlNets that callers add, and their profiles.

    An example is postgresql://bottega@db.example/bottega, with the password in PGPASSWORD or PGPASSFILE. A ControlNet
    that is added at one server is hosted by all servers with this URL. They need `objects`, or equal files below
    `root`, for example in a network folder. `catalogue` has a copy of the list, which a server uses while the database
    is away. If empty, the list is only in `catalogue`.
    """
    objects: ObjectsAddress = ""
    """Where the files of ControlNets in `database` are stored: s3://bucket/prefix.

    Files of ControlNets that were added at other servers are copied below `root`. No other database may use the prefix,
    and no other machine may use the folder `root`. Endpoint, region, credentials and
    encryption come from the environment, as for the gateway's `objects`. It needs the package obstore.
    """
    start_stall_s: Seconds = 120.0
    """Seconds without progress after which a starting engine counts as hung and is replaced.

    Loading ControlNets has a limit of its own, and systemd waits for it.
    """
    hang_s: Seconds = 60.0
    """Seconds without a message after which a running engine is replaced."""
    stall_s: Seconds = 120.0
    """Seconds without a completed forward pass, while steps wait, after which the engine is replaced."""
