"""Settings that the configurations of all services of the fleet have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.rpc.address import OptionalAddress
from bottega.rpc.server_config import ServerConfig
from bottega.strict import STRICT

AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """Settings of a service that joins the gateway's fleet."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Annotated[str, Field(max_length=128)] = ""
    """Name of this service, unique in the fleet. Empty: the service's kind and the process ID, such as loras-4711."""
    gateway: OptionalAddress = "127.0.0.1:8472"
    """Address of the gateway's fleet listener (its fleet.listen), host:port. Empty: the service joins no fleet."""
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(MemberConfig):
    """Settings of a store."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    folder: str = ""
    """Folder of the store's database and files. Empty: a folder named after the kind in Bottega's state folder."""
