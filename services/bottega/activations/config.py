"""The configuration of an activation store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.rpc.address import OptionalAddress
from bottega.rpc.links_config import LimitedLinksConfig
from bottega.rpc.server_config import ServerConfig
from bottega.strict import STRICT

AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsConfig:
    """Settings of an activation store."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Annotated[str, Field(max_length=128)] = ""
    """Name of this service, unique in the fleet. Empty: "activations-" and the process id."""
    gateway: OptionalAddress = "127.0.0.1:8472"
    """Address of the gateway's fleet listener (its fleet.listen), host:port. Empty: the service joins no fleet."""
    server: ServerConfig = field(default_factory=ServerConfig)
    links: LimitedLinksConfig = field(default_factory=LimitedLinksConfig)
    folder: str = ""
    """Folder of records and activations. Empty: activations/ in Bottega's state folder."""
    budget_bytes: AtLeastOne = 16 << 30
    """Bound on the bytes of activations in memory, which workers of this host share."""
    disk_bytes: AtLeastOne = 256 << 30
    """Bound on the bytes of activations on disk.

    Beyond it, or when the disk is full, whole templates are evicted, least recently used first, except pinned ones.
    """
    min_free_bytes: NotNegative = 1 << 30
    """Free disk space in bytes that is left to others; at most a twentieth of the disk."""
    template_mib: NotNegative = 2662
    """Bound on one template in MiB. Workers then record the blocks that save most time per byte. 0: no bound."""
    waiting_bytes: AtLeastOne = 1 << 30
    """Bound on the bytes of recordings that arrive or wait to be written. More is dropped, and no worker waits."""
    loads_at_once: AtLeastOne = 4
    """Bound on loads from disk that run at once."""
