"""The configuration of a ControlNet server and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega.device_names import DeviceName
from bottega.rpc.address import OptionalAddress
from bottega.rpc.server import ServerConfig
from bottega.strict import STRICT

AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetEngineConfig:
    """Settings of the engine process.

    device: auto, cpu, cuda or cuda:N. dtype: that of the workers' models; auto uses each worker's own and loads a
    ControlNet once for each element type in use. threads: 0 leaves the number to torch.
    exclusive_cores: whether nothing else computes on the cores that this engine may use, as a worker's.
    device_memory_mib: of the device, that ControlNets, forwards and links may take together; 0 is what is free when the
    engine starts, less a reserve; of a CPU it is 0. budget_bytes: most bytes of weights that are loaded at once; where
    the device has less, three quarters of that. max_rows: of one forward; a guided step has two for each of its images.
    fixed_rows: pads every forward to so many rows, for images that are equal byte for byte whatever runs beside them; 0
    is off.
    links_listen: host:port on which workers of other hosts open links; port 0 is any free one, empty is none.
    links_advertised: host:port that workers are told instead, if a relay or an address translation is in between.
    links_seal: whether data from and to workers of other hosts is encrypted; false is for a trusted network, and is
    needed for links between devices of two hosts.
    links_socket: path of the unix socket for workers of this host, in a folder that nobody else can write to; empty is
    one in the folder that systemd makes for the unit, else in a private one of this user; null is none. It is for this
    user, and for the group that BOTTEGA_LINKS_GROUP in the environment names.
    device_links: auto links GPUs with those of other processes if both support it, by shared device memory within a
    host, else by NCCL; off moves all tensors through host memory; gloo, at both ends, uses Gloo's own connections,
    which are neither encrypted nor authenticated: for tests.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    device: DeviceName = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    threads: NotNegative = 0
    exclusive_cores: bool = False
    device_memory_mib: NotNegative = 0
    budget_bytes: AtLeastOne = 8 << 30
    max_rows: AtLeastOne = 16
    fixed_rows: NotNegative = 0
    links_listen: Annotated[str, Field(pattern=r"^(.+:\d+)?$")] = "127.0.0.1:0"
    links_advertised: Annotated[str, Field(pattern=r"^(.+:\d+)?$")] = ""
    links_socket: str | None = ""
    links_seal: bool = True
    device_links: Literal["auto", "off", "gloo"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetConfig:
    """Settings of a ControlNet server.

    name: unique in the fleet; empty is "controlnet-" and the process's id. gateway: its fleet.listen, host:port; empty
    joins no fleet.
    engine_on_demand: whether the first request that needs the engine starts it, and waits for that; false starts it
    with the server. One that is idle takes 350 MiB. A server that hosts what callers have added starts it at once.
    controlnets: by name, the folders of ControlNets that it hosts, in Diffusers' layout;
    miniature/edges and miniature/layout are the embedded model's own.
    left_out: by name, what is not hosted, and why; the fleet is told. bottega up lists there what lies beside the
    ControlNets in a model's folder.
    root: folder that must contain the folders that callers add; empty forbids adding.
    catalogue: the SQLite file that remembers added ControlNets and measured profiles; empty is controlnets.db in the
    folder for Bottega's state. Only one server at a time may use it.
    start_stall_s: time without progress of its start after which the engine counts as hung and is replaced; hosting
    ControlNets has its own limit, and systemd waits as long. hang_s: time without a message of an engine that is ready,
    after which the same happens. stall_s: time without a forward although steps wait, after which the same happens.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    renamed_keys: ClassVar[Mapping[str, str]] = {"start_s": "start_stall_s"}

    name: Annotated[str, Field(max_length=128)] = ""
    gateway: OptionalAddress = "127.0.0.1:8472"
    server: ServerConfig = field(default_factory=ServerConfig)
    engine: ControlNetEngineConfig = field(default_factory=ControlNetEngineConfig)
    engine_on_demand: bool = False
    controlnets: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    root: str = ""
    catalogue: str = ""
    start_stall_s: Seconds = 120.0
    hang_s: Seconds = 60.0
    stall_s: Seconds = 120.0
