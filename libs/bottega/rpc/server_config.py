"""The configuration of a server: its listeners, its tensor links, and the ports that it refuses to open.

The settings that all services of the fleet share are here, too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Literal, cast

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from bottega.errors import ConfigError
from bottega.rpc.address import grpc_target, is_loopback, join_list, split
from bottega.rpc.channel import MAX_MESSAGE_MIB
from bottega.rpc.security.tls import TlsConfig
from bottega.strict import STRICT

PLAIN_TEXT = "it is not encrypted (no server.tls)"
"""Reason why anyone can use a port without TLS."""
PLAIN_HTTP = "it is not encrypted (neither server.https nor server.tls)"
"""Reason why anyone can use a port of HTTP without certificates."""


def _checked(address: str) -> str:
    """Return an address unchanged. Raise ValueError, which pydantic reports with the key, if it is not host:port."""
    try:
        split(address)
    except ConfigError as error:
        raise ValueError(error.message) from None
    return address


def _joined(addresses: object, *, balanced: bool) -> object:
    """Return one address or a list as one text. Raise ValueError, which pydantic reports with the key.

    Args:
        addresses: The value of the key. Only texts and lists of texts are checked here.
        balanced: Whether one gRPC channel calls all of them.
    """
    many = isinstance(addresses, list | tuple) and all(isinstance(address, str) for address in addresses)
    if addresses == "" or not (many or isinstance(addresses, str)):
        return addresses
    try:
        text = join_list(cast("str | list[str]", addresses))
        if balanced:
            grpc_target(text)
    except ConfigError as error:
        raise ValueError(error.message) from None
    return text


Address = Annotated[str, AfterValidator(_checked)]
"""An address in a configuration, "host:port"."""
MemberGateways = Annotated[str, BeforeValidator(functools.partial(_joined, balanced=False))]
"""The gateways that a service joins: an address, a list of them, or "" for none. A list becomes one text."""
CalledGateways = Annotated[str, BeforeValidator(functools.partial(_joined, balanced=True))]
"""As MemberGateways, for gateways that one gRPC channel calls."""

HostPort = Annotated[str, Field(pattern=r"^(.+:\d+)?$")]
AtLeastOne = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerConfig:
    """Settings of one listener (port) of a service."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    listen: Address = "127.0.0.1:0"
    """Address of the listener, host:port. Port 0 takes any free port."""
    max_message_mib: Annotated[int, Field(ge=1, le=1024)] = MAX_MESSAGE_MIB
    """Upper bound on the size of one message, in MiB."""
    max_requests_mib: Annotated[int, Field(ge=1)] = 128
    """Upper bound in MiB on requests with images that are being received or processed.

    The service's memory grows by up to five times that. One host (one tenant, if there are tenants) may use peer_share
    of it. Streamed requests (members of the fleet, uploads) have as much again, and small requests have memory of their
    own.
    """
    max_calls: Annotated[int, Field(ge=1)] = 2048
    """Upper bound on unary calls (GetJob, SubmitJob, ...) that are served at the same time.

    Health and reflection, and calls that stream requests, have as many again.
    """
    max_streams: Annotated[int, Field(ge=1)] = 2048
    """Upper bound on calls that stream answers (WatchJob, Generate) and are open at the same time.

    They do not count as unary calls. As many ended calls of each kind may wait for callers that do not read; each takes
    up to a third of a MiB. Further calls get RESOURCE_EXHAUSTED and a time to retry.
    """
    peer_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of each of these bounds that one host may use.

    One connection may use that share of the host's: by default a host 1,024 and a connection 512 of 2,048 streams.
    Hosts get less while others use much, so that a new host can always call. A host with a proxy, or with hundreds of
    waiting callers, needs more max_streams, or 1.0: then one host may use everything.
    """
    max_connections: Annotated[int, Field(ge=1)] = 4096
    """Upper bound on open connections, each with up to 640 calls; at most a quarter of the limit on open files.

    If one host has more than peer_share of them, its connections without calls are closed. A connection without calls
    is closed after some minutes, and at once if its host makes more than 250 unauthenticated calls a second. Such a
    host is banned for 10 s and then admitted for 5 s, so that other callers behind its address can connect. It is not
    banned if an authenticated caller used it within the last day: then the data of its connections with refused calls
    is dropped for 10 s. Neither happens with a peer_share of 1.0, because the host may be a proxy.
    """
    max_answers_mib: Annotated[int, Field(ge=1)] = 64
    """Upper bound in MiB on large answers (images that are sent with events) that callers have not read yet.

    The service's memory grows by up to four times that. Beyond it, images are sent only to callers that fetch them.
    """
    insecure: bool = False
    """Whether the port may be open to the network although its callers are not authenticated.

    That is the case without TLS, or with neither client certificates nor API keys. If false, the service does not start
    then.
    """
    client_certificates: bool = True
    """Whether TLS clients need a certificate that the authority signed.

    Set false for a gateway whose callers use API keys instead.
    """
    reflection: bool = True
    """Whether callers may list the methods, as grpcurl does."""
    answer_wait_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds in which a caller must read an answer of a stream. Otherwise its call ends with UNAVAILABLE.

    It is 5 s while other callers are refused because of it. A caller that reads and waits for news is not affected. The
    answer of a unary call stays until the caller's deadline or until its connection ends.
    """
    default_deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline in seconds of calls whose caller sets none."""

    def __post_init__(self) -> None:
        if self.max_requests_mib < self.max_message_mib:
            needed = f"must be at least max_message_mib, {self.max_message_mib}"
            raise ValueError(f"max_requests_mib is {self.max_requests_mib}; {needed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(ListenerConfig):
    """Settings of a service's server: its main listener, metrics, log and shutdown."""

    metrics_listen: Address = "127.0.0.1:0"
    """Address of the metrics over HTTP, host:port.

    Port 0 takes any free port. Metrics are never encrypted; unless the address is loopback, they need insecure: true.
    """
    tls: TlsConfig = field(default_factory=TlsConfig)
    """TLS files of the service, for all its listeners and for its own calls."""
    audit: str = ""
    """File that receives a line of JSON for each call that changes something: caller, method, time and outcome.

    With its older copies it stays below about 600 MB. Empty: no audit log.
    """
    drain_grace_s: Annotated[float, Field(gt=0)] = 20.0
    """Seconds for running calls to end after SIGTERM. TimeoutStopSec of the systemd unit is longer."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpsConfig:
    """PEM files of an HTTPS port: both or none."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    certificate: str = ""
    """Certificate with the host names that clients use, followed by intermediate certificates.

    Empty: that of `tls`, whose authority clients then have to trust, and which has no host names.
    """
    key: str = ""
    """Private key of the certificate. Only the user of the service and root may be able to read it."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key must both be set")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServerConfig:
    """Settings of a service's HTTP server: its port, its limits, metrics, log and shutdown."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    listen: Address = "127.0.0.1:8473"
    """Address of the listener, host:port. Port 0 takes any free port."""
    insecure: bool = False
    """Whether the port may be open to the network without HTTPS, or for a gateway that asks its callers for no key."""
    https: HttpsConfig = field(default_factory=HttpsConfig)
    """Certificate of the port. It is read again when it changes."""
    max_body_mib: Annotated[int, Field(ge=1, le=1024)] = 34
    """Upper bound on the size of a request's body, in MiB: images in JSON take 4/3 of their size."""
    max_bodies_mib: Annotated[int, Field(ge=1)] = 256
    """Upper bound in MiB on all bodies that are being received or processed. Further requests get 429.

    The service's memory grows by up to four times that.
    """
    max_requests: Annotated[int, Field(ge=1)] = 4096
    """Upper bound on requests that are served at the same time, streams of events included. Further ones get 429."""
    max_connections: Annotated[int, Field(ge=1)] = 4096
    """Upper bound on open connections. Further ones are closed at once."""
    peer_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of each of these bounds that one host may use. A proxy in front of the service needs 1.0."""
    head_wait_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds in which a client must send the head of a request. Otherwise its connection is closed."""
    body_wait_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds in which a client must send the body of a request. Otherwise it gets 408."""
    answer_wait_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds in which a client must read a part of its answer. Otherwise its connection is closed."""
    idle_s: Annotated[float, Field(gt=0)] = 75.0
    """Seconds after which a connection without requests is closed."""
    metrics_listen: Address = "127.0.0.1:0"
    """Address of the metrics over HTTP, host:port.

    Port 0 takes any free port. Metrics are never encrypted; unless the address is loopback, they need insecure: true.
    """
    tls: TlsConfig = field(default_factory=TlsConfig)
    """TLS files of the service for its calls to the gateway, such as `bottega certs issue http/NAME` creates."""
    drain_grace_s: Annotated[float, Field(gt=0)] = 20.0
    """Seconds for running requests to end after SIGTERM. TimeoutStopSec of the systemd unit is longer."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log lines. The log of requests is at level info."""

    @property
    def encrypted(self) -> bool:
        """Whether the port uses HTTPS."""
        return bool(self.https.certificate) or self.tls.given


def refused_ports(config: object) -> list[str]:
    """Return the reasons why a service with this configuration would refuse to open its ports.

    Only the configuration is checked. The service itself also checks that callers are authenticated if there is TLS.
    """
    found = {field.name: getattr(config, field.name) for field in fields(config)}  # type: ignore[arg-type]
    server = found.get("server")
    if isinstance(server, HttpServerConfig):
        is_open = not (server.encrypted or server.insecure or is_loopback(server.listen))
        refusals = [open_port_text("server.listen", server.listen, PLAIN_HTTP)] if is_open else []
        return [*refusals, *filter(None, [open_metrics_text(server)])]
    if not isinstance(server, ServerConfig):
        return []
    listeners = {name: value for name, value in found.items() if isinstance(value, ListenerConfig)}
    refusals = [
        open_port_text(f"{name}.listen", listener.listen, PLAIN_TEXT)
        for name, listener in listeners.items()
        if not (server.tls.given or listener.insecure or is_loopback(listener.listen))
    ]
    return [*refusals, *filter(None, [open_metrics_text(server)])]


def open_port_text(key: str, listen: str, open_to: str) -> str:
    """Return the error text for a port that anyone in the network can use.

    Args:
        open_to: Why anyone can use it.
    """
    return (
        f"{key} {listen} can be reached from the network, and {open_to}: give it certificates (bottega certs), or set"
        " insecure: true beside it if the network is trusted"
    )


def open_metrics_text(config: ServerConfig | HttpServerConfig) -> str | None:
    """Return the error text for metrics that anyone in the network can read, or None."""
    if config.insecure or is_loopback(config.metrics_listen):
        return None
    return (
        f"server.metrics_listen {config.metrics_listen} can be reached from the network, and metrics are not encrypted:"
        " set server.insecure: true if the network is trusted"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksConfig:
    """Addresses on which a service accepts tensor links from workers."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    listen: HostPort = "127.0.0.1:0"
    """Address for links from workers on other hosts, host:port. Port 0 takes any free port. Empty: no such links."""
    advertised: HostPort = ""
    """Address that workers get instead of `listen`, host:port, if there is a relay or NAT. Empty: `listen`."""
    socket: str | None = ""
    """Path of the unix socket for workers on this host, in a folder that no other user can write to.

    Empty: a socket in the folder that systemd creates for the unit, else in a private folder of this user. null: no
    socket. This user may connect, and the group that the environment variable BOTTEGA_LINKS_GROUP names.
    """
    seal: bool = True
    """Whether to encrypt data to workers on other hosts. Set false only in a trusted network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLinksConfig(LinksConfig):
    """Addresses on which a service with a device accepts tensor links, and direct transfers between GPUs."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    seal: bool = True
    """Whether to encrypt data to and from workers on other hosts.

    Set false only in a trusted network. Direct transfers between GPUs of two hosts need false.
    """
    devices: Literal["auto", "off", "gloo"] = "auto"
    """How tensors move between GPUs of different processes.

    auto: directly if both GPUs can, by shared device memory within a host, else by NCCL. off: through host memory.
    gloo, on both sides: by Gloo, which neither encrypts nor authenticates; for tests.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedLinksConfig(LinksConfig):
    """Addresses on which a store accepts tensor links from workers, and the bandwidth limit of each link."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    bytes_per_s: NotNegative = 0
    """Upper bound on the bytes per second of each link.

    0: no bound. Only then do workers on this host map the store's memory instead of receiving bytes.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """Settings of a service that joins the gateway's fleet."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Annotated[str, Field(max_length=128)] = ""
    """Name of this service, unique in the fleet. Empty: the service's kind and the process ID, such as loras-4711."""
    gateway: MemberGateways = "127.0.0.1:8472"
    """Address of the gateway's fleet listener (its fleet.listen), host:port. Empty: the service joins no fleet.

    With several gateways a list, or a name that resolves to all of them: the service joins each.
    """
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(MemberConfig):
    """Settings of a store."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    folder: str = ""
    """Folder of the store's database and files. Empty: a folder named after the kind in Bottega's state folder."""
