"""What a ControlNet server and its engine may be told."""

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
    """What the engine process may be told.

    device: auto, cpu, cuda or cuda:N. dtype: that of the workers' models; auto is that of each worker that comes, and
    loads a ControlNet once for each of their element types. threads: 0 leaves the number to torch.
    exclusive_cores: whether nothing else computes on the cores that this engine may use, as a worker's.
    device_memory_mib: of the device, that ControlNets, forwards and links may take together; 0 is what is free when the
    engine starts, less a reserve; of a CPU it is 0. budget_bytes: most bytes of weights that are loaded at once; where
    the device has less, three quarters of that. max_rows: of one forward; a guided step has two for each of its images.
    fixed_rows: pads every forward to so many rows, for images that are equal byte for byte whatever runs beside them;
    0 is off.
    links_listen: host:port on which links of workers of other hosts come in; port 0 is any free one, empty is none.
    links_advertised: host:port that workers are told instead, where a relay or an address translation is between.
    links_seal: whether what workers of other hosts send and get is encrypted; false is for a network that is trusted,
    and links between devices of two hosts need it.
    links_socket: path of the unix socket for those of this host, in a folder that nobody else can write to; empty is
    one in the folder that systemd makes for the unit, else in a private one of this user; null is none. It is for this
    user, and for the group that BOTTEGA_LINKS_GROUP in the environment names.
    device_links: auto links GPUs with those of other processes where both can, by memory that they share within a host,
    else by NCCL; off moves all tensors through memory of the host; gloo, at both ends, through Gloo's own connections,
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
    """What a ControlNet server may be told.

    name: unique in the fleet; empty is "controlnet-" and the process's id. gateway: its fleet.listen, host:port;
    empty joins no fleet.
    engine_on_demand: whether the first request that needs the engine starts it, and waits for that; false starts it
    with the server. One that is idle takes 350 MiB. A server that hosts what callers have added starts it at once.
    controlnets: by name, the folders of ControlNets that it hosts, in Diffusers' layout;
    miniature/edges and miniature/layout are the embedded model's own.
    left_out: by name, what is not hosted, and why: the fleet is told; bottega up says so of what lies beside the
    ControlNets in a model's folder.
    root: below it are the folders that callers may add; empty is none.
    catalogue: the SQLite file that remembers those, and what was measured of ControlNets; empty is controlnets.db in
    the folder for Bottega's state. One server at a time may use it.
    start_stall_s: that the engine may take to start, after which it is taken for hung and replaced; hosting ControlNets
    takes its own time, and systemd waits as long. hang_s: without a word of an engine that is ready, after which the
    same happens. stall_s: the same without a forward though steps wait.
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
