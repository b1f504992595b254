"""The configuration of links from workers to a service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega.strict import STRICT

HostPort = Annotated[str, Field(pattern=r"^(.+:\d+)?$")]
NotNegative = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksConfig:
    """Addresses on which workers open links to a service."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    listen: HostPort = "127.0.0.1:0"
    """Address for links from workers of other hosts, host:port. Port 0 takes any free port. Empty: no such links."""
    advertised: HostPort = ""
    """Address that workers are told instead of `listen`, host:port, behind a relay or an address translation."""
    socket: str | None = ""
    """Path of the unix socket for workers of this host, in a folder that no other user can write to.

    Empty: one in the folder that systemd makes for the unit, else in a private folder of this user. null: no socket.
    This user may connect, and the group that BOTTEGA_LINKS_GROUP in the environment names.
    """
    seal: bool = True
    """Encrypt data to workers of other hosts. Set false only in a trusted network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLinksConfig(LinksConfig):
    """Addresses on which workers open links to a service that computes on a device, and links between GPUs."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    seal: bool = True
    """Encrypt data to and from workers of other hosts.

    Set false only in a trusted network; links between devices of two hosts need false.
    """
    devices: Literal["auto", "off", "gloo"] = "auto"
    """auto: link GPUs with those of other processes if both can, by shared device memory within a host, else by NCCL.

    off: move all tensors through host memory. gloo, at both ends: use Gloo's connections, which are neither encrypted
    nor authenticated; for tests.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedLinksConfig(LinksConfig):
    """Addresses on which workers open links to a store, and the limit of each link."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    bytes_per_s: NotNegative = 0
    """Limit of each link in bytes per second.

    0: no limit, and only then do workers of this host map the memory of the store instead of receiving bytes.
    """
