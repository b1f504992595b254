"""The configuration of an approximate cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega.rpc.address import OptionalAddress
from bottega.rpc.server import ServerConfig
from bottega.strict import STRICT

AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
HostPort = Annotated[str, Field(pattern=r"^(.+:\d+)?$")]

PolicyName = Literal["lcbfu", "lcbfu-decayed", "lru", "lfu", "fifo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLinksConfig:
    """Addresses on which workers open links.

    listen: host:port for workers of other hosts; port 0 is any free one, empty is none. advertised: host:port that
    workers are told instead, if a relay or an address translation is in between. socket: path of the unix socket for
    workers of this host, in a folder that nobody else can write to; empty is one in the folder that systemd makes for
    the unit, else in a private one of this user; null is none; it is for this user, and for the group that
    BOTTEGA_LINKS_GROUP in the environment names. seal: whether data to workers of other hosts is encrypted; false is
    for a trusted network.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    listen: HostPort = "127.0.0.1:0"
    advertised: HostPort = ""
    socket: str | None = ""
    seal: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Settings of an approximate cache.

    name: unique in the fleet; empty is "cache-" and the process's id. gateway: its fleet.listen, host:port; empty joins
    no fleet.
    folder: of records, latents and pictures; empty is cache in the folder for Bottega's state. budget_bytes: for
    latents on the disk, and for a small picture of each entry. min_free_bytes: free space of the disk that is left to
    others; at most a twentieth of the disk. max_entries: most pictures with cached latents.
    policy: which latents are evicted first. "lcbfu" is frequency times steps (Nirvana, NSDI'24), "lcbfu-decayed" the
    same with a frequency that halves over time; the others are for comparison. half_life: questions after which that
    frequency halves.
    exploration: share of hits that are drawn from noise all the same, so that pictures stay various.
    row_pictures: pictures of one prompt in a row, for any caller, of which one at most starts from what another
    one of them came from; with 1 all may.
    plain_for_loras: whether pictures with LoRAs may start from latents that were recorded without any, up to the step
    at which the LoRAs must be loaded. Set it only if lora_accuracy_drop_points of load/README.md is small enough.
    predictor: whether searches that are predicted to find nothing may be skipped, as long as measurements show that
    this pays.
    profiles: files of measured profiles (CacheProfile as JSON), for models that have none yet.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Annotated[str, Field(max_length=128)] = ""
    gateway: OptionalAddress = "127.0.0.1:8472"
    server: ServerConfig = field(default_factory=ServerConfig)
    links: CacheLinksConfig = field(default_factory=CacheLinksConfig)
    folder: str = ""
    budget_bytes: AtLeastOne = 16 << 30
    min_free_bytes: NotNegative = 1 << 30
    max_entries: AtLeastOne = 200_000
    policy: PolicyName = "lcbfu"
    half_life: AtLeastOne = 10_000
    exploration: Share = 0.05
    row_pictures: AtLeastOne = 6
    plain_for_loras: bool = False
    predictor: bool = True
    profiles: list[str] = field(default_factory=list)
