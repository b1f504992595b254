"""The configuration of an activation store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.rpc.address import OptionalAddress
from bottega.rpc.server import ServerConfig
from bottega.strict import STRICT

AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
HostPort = Annotated[str, Field(pattern=r"^(.+:\d+)?$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationLinksConfig:
    """The configuration of links to workers.

    listen: host:port for workers of other hosts; port 0 is any free one, empty is none. advertised: host:port that
    workers are told instead, behind a relay or an address translation. socket: path of the unix socket for workers of
    this host, in a folder that nobody else can write to; empty is one in the folder that systemd makes for the unit,
    else in a private one of this user; null is none. This user may connect, and the group that BOTTEGA_LINKS_GROUP in
    the environment names. seal: whether data to workers of other hosts is encrypted; false is for a trusted network.
    bytes_per_s: limit of each link; 0 is none, and only then do workers of this host map the store's memory instead of
    receiving bytes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    listen: HostPort = "127.0.0.1:0"
    advertised: HostPort = ""
    socket: str | None = ""
    seal: bool = True
    bytes_per_s: NotNegative = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsConfig:
    """The configuration of an activation store.

    name: unique in the fleet; empty is "activations-" and the process's id. gateway: its fleet.listen, host:port; empty
    joins no fleet. folder: where records and activations are kept; empty is activations in the folder for Bottega's
    state. budget_bytes: bound on activations in memory, which workers of this host share. disk_bytes: bound on
    activations on disk. Beyond it, or when the disk itself is full, whole templates are evicted, least recently used
    first, except pinned ones. min_free_bytes: room on the disk that is left to others; at most a twentieth of the disk.
    template_mib: bound on one template, of which workers record the blocks that save most time per byte; 0 is no bound.
    waiting_bytes: bound on recordings that arrive or wait to be written; more is dropped, and no worker waits.
    loads_at_once: parallel loads from disk into memory.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Annotated[str, Field(max_length=128)] = ""
    gateway: OptionalAddress = "127.0.0.1:8472"
    server: ServerConfig = field(default_factory=ServerConfig)
    links: ActivationLinksConfig = field(default_factory=ActivationLinksConfig)
    folder: str = ""
    budget_bytes: AtLeastOne = 16 << 30
    disk_bytes: AtLeastOne = 256 << 30
    min_free_bytes: NotNegative = 1 << 30
    template_mib: NotNegative = 2662
    waiting_bytes: AtLeastOne = 1 << 30
    loads_at_once: AtLeastOne = 4
