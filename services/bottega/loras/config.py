"""What a LoRA store may be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.rpc.address import OptionalAddress
from bottega.rpc.server import ServerConfig
from bottega.strict import STRICT

AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksConfig:
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

    listen: Annotated[str, Field(pattern=r"^(.+:\d+)?$")] = "127.0.0.1:0"
    advertised: Annotated[str, Field(pattern=r"^(.+:\d+)?$")] = ""
    socket: str | None = ""
    seal: bool = True
    bytes_per_s: NotNegative = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportConfig:
    """How untrusted files are imported.

    root: below it are the files and folders that callers may register; empty is none. max_bytes: of one file, or of a
    folder's files. upload_s: in which an upload's bytes have to come. idle_s: in which the next 256 KiB of them
    have to, else it is ended. uploads, upload_bytes: that may be unfinished at once, and what they announced together;
    one host may have half of each. at_once: imports that run. deadline_s, cpu_s: of one import, whose memory its file's
    size bounds.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    root: str = ""
    max_bytes: AtLeastOne = 4 << 30
    upload_s: Seconds = 600.0
    idle_s: Seconds = 30.0
    uploads: AtLeastOne = 16
    upload_bytes: AtLeastOne = 16 << 30
    at_once: AtLeastOne = 2
    deadline_s: Seconds = 300.0
    cpu_s: AtLeastOne = 120

    def __post_init__(self) -> None:
        if self.upload_bytes < self.max_bytes:
            raise ValueError(f"upload_bytes is {self.upload_bytes}; at least max_bytes, which is {self.max_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLora:
    """A LoRA that a store brings itself. path: its file or folder; miniature/NAME is one of the embedded model's own.
    base: the name of the model that it is for."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    path: str
    base: str = "miniature"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """What a LoRA store may be told.

    name: unique in the fleet; empty is "loras-" and the process's id. gateway: its fleet.listen, host:port; empty
    joins no fleet.
    folder: of catalogue and files; empty is loras in the folder for Bottega's state. bases: by the name of the model,
    the folder of each base model in Diffusers' layout; "miniature" is the embedded one. loras: by name, those that it
    has from every start: one that was removed is back at the next, and one that has the name already stays.
    left_out: by name, what it does not take in, and why: the fleet is told; bottega up says so of what lies beside the
    LoRAs in a model's folder.
    budget_bytes: of LoRAs in memory, where there are at most half as many as the process may have files open; what is
    used longest ago goes first. disk_bytes: of those on the disk, with what is in quarantine and what unfinished
    uploads have announced. min_free_bytes: of the disk, that uploads and imports leave to others; of one smaller than
    20 times that, a twentieth. loads_at_once: from the disk into memory.
    lease_s: for how long a LoRA that a job needs is not deleted; gateways say every 3 s which they need.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Annotated[str, Field(max_length=128)] = ""
    gateway: OptionalAddress = "127.0.0.1:8472"
    server: ServerConfig = field(default_factory=ServerConfig)
    links: LinksConfig = field(default_factory=LinksConfig)
    imports: ImportConfig = field(default_factory=ImportConfig)
    folder: str = ""
    bases: dict[str, str] = field(default_factory=lambda: {"miniature": "miniature"})
    loras: dict[str, OwnLora] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    budget_bytes: AtLeastOne = 4 << 30
    disk_bytes: AtLeastOne = 256 << 30
    min_free_bytes: NotNegative = 1 << 30
    loads_at_once: AtLeastOne = 4
    lease_s: Seconds = 10.0
