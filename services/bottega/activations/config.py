"""What an activation store may be told."""

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
    """Where workers' links come in.

    listen: host:port for those of other hosts; port 0 is any free one, empty is none. advertised: host:port that
    workers are told instead, where a relay or an address translation is between. socket: path of the unix socket for
    those of this host, in a folder that nobody else can write to; empty is one in the folder that systemd makes for the
    unit, else in a private one of this user; null is none; it is for this user, and for the group that
    BOTTEGA_LINKS_GROUP in the environment names. seal: whether what workers of other hosts get is
    encrypted; false is for a network that is trusted. bytes_per_s: that each link may take; 0 is all, and only then
    do workers of this host share the store's memory instead of being sent bytes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    listen: HostPort = "127.0.0.1:0"
    advertised: HostPort = ""
    socket: str | None = ""
    seal: bool = True
    bytes_per_s: NotNegative = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsConfig:
    """What an activation store may be told.

    name: unique in the fleet; empty is "activations-" and the process's id. gateway: its fleet.listen, host:port; empty
    joins no fleet.
    folder: of records and activations; empty is activations in the folder for Bottega's state. budget_bytes: of
    activations in memory, which workers of this host share. disk_bytes: of those on the disk; the template used longest
    ago goes first, as a whole, and pinned ones stay; so they go where the disk itself has less room. min_free_bytes: of
    the disk, that are left to others; of one smaller than 20 times that, a twentieth. template_mib: that one template
    may take, of which workers keep the blocks that save most time for their bytes; 0 is without bound. waiting_bytes:
    of recordings that come, or wait to be written; what is more is dropped, and no worker waits. loads_at_once: from
    the disk into memory.
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
