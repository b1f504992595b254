"""The configuration of the HTTP API."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.errors import ConfigError
from bottega.outside_rules import OutsideRules
from bottega.rpc.security.private_files import FILES_OF_UNITS, read_private
from bottega.rpc.server_config import CalledGateways, HttpServerConfig
from bottega.strict import STRICT

Seconds = Annotated[float, Field(gt=0)]
_LEAST_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig(OutsideRules):
    """The hosts from which input images are fetched that requests name by URL. By default there are none."""

    timeout_s: Seconds = 10.0
    """Seconds in which an image must come, redirects included."""
    max_redirects: Annotated[int, Field(ge=0, le=10)] = 3
    """Upper bound on redirects of one image. Each must lead to an allowed host."""
    max_at_once: Annotated[int, Field(ge=1)] = 32
    """Upper bound on images that are being fetched. Further requests with URLs get 429."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """The configuration of the HTTP API."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    gateway: Annotated[CalledGateways, Field(min_length=1)] = "127.0.0.1:8470"
    """Address of the gateway's port for callers (its server.listen), host:port.

    With several gateways a list of IP addresses, or a name that resolves to all of them: each call goes to another one.
    """
    fleet: CalledGateways = "127.0.0.1:8472"
    """Address of the gateway's fleet listener (its fleet.listen), host:port; with several gateways a list as above.

    Empty: the service joins no fleet.
    """
    name: Annotated[str, Field(max_length=128)] = ""
    """Name of this service, unique in the fleet. Empty: that in its certificate, else http and the process ID."""
    server: HttpServerConfig = field(default_factory=HttpServerConfig)
    hosts: list[str] = field(default_factory=list)
    """Host names by which clients may call the service, without ports.

    Requests for other names are refused, so that no page of a stranger reaches the service by a name that it points
    here (DNS rebinding). localhost and IP addresses are always allowed.
    """
    origins: list[str] = field(default_factory=list)
    """Origins of web pages that may call the service from a browser (CORS), such as https://app.example.com.

    Empty: only pages of the service's own origin.
    """
    public_url: str = ""
    """URL by which clients reach the service, if a proxy is in front of it; used in URLs of images.

    Empty: as in the request.
    """
    url_ttl_s: Seconds = 3600.0
    """Seconds for which the URL of an image (response_format "url") is valid."""
    url_key: str = ""
    """File with a secret of 32 bytes or more that seals the URLs of images, the same for all instances.

    Empty: a random secret, with which URLs are valid for this process only.
    """
    fetch: FetchConfig = field(default_factory=FetchConfig)
    """Input images by URL."""
    request_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """Upper bound on the seconds of a request that draws. The client gets 504 then, and the pictures are cancelled."""
    gateway_wait_s: Annotated[float, Field(ge=0)] = 3.0
    """Seconds for which a request waits for a gateway that cannot be reached. The client gets 503 then."""


def read_url_key(config: HttpConfig) -> bytes | None:
    """Return the secret in the file of `url_key`; None if there is none. Raise ConfigError if it cannot be used."""
    if not config.url_key:
        return None
    secret = read_private(Path(config.url_key).expanduser()).strip()
    if len(secret) < _LEAST_KEY_BYTES:
        raise ConfigError(f"url_key: {config.url_key} has {len(secret)} bytes, at least {_LEAST_KEY_BYTES} are needed")
    return secret


def check_url_key(config: HttpConfig) -> None:
    """Raise ConfigError if the file of `url_key` cannot be used.

    Skip a file under /run/credentials, which exists only while the unit runs.
    """
    if not config.url_key.startswith(FILES_OF_UNITS):
        read_url_key(config)
