"""gRPC channels to Bottega's services: trusted certificates, message limits, keepalive and quick reconnection."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from bottega.rpc import telemetry
from bottega.rpc.address import grpc_target, is_name, split_list
from bottega.rpc.security.api_keys import bearer
from bottega.rpc.security.caller import Role, dns_name
from bottega.rpc.security.tls import AuthorityFile, TlsFiles

# An input image of 8 MiB with a mask and a few control images; as in ServerConfig.
MAX_MESSAGE_MIB = 24
# Such a request and the kept latents of its image (rules.MAX_KEPT_BYTES, 26 MiB), which a gateway adds for the worker.
MAX_ATTEMPT_MIB = MAX_MESSAGE_MIB + 26

# Upper bound on trailers, which have the details of a BottegaError. gRPC's default, 8 KiB, is too small for long lists.
MAX_METADATA_BYTES = 64 * 1024

# Each call goes to the next server that says SERVING, so one that stops, or whose database is away, gets none. A retry
# policy is left out on purpose, and hedging as well. gRPC's makes at most five tries and chooses by status code alone.
# The SDK's (client.transport.calls) goes on until a gateway has restarted, tells from the reason whether a retry helps,
# waits as long as the gateway asks for, and gives each try the time that is left.
_BALANCING = json.dumps({"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}})
_BALANCING_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.service_config", _BALANCING),
    # A name is resolved again when a connection ends, at most this often; by default it would be 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # A frozen server is left after 20 s, because another one can answer. The time-out of pings, 60 s by default,
    # counts where a ping that measures the bandwidth is not answered: keepalive waits for that one.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
]


ApiKey = str | Callable[[], str]
"""An API key, or a function that returns the key of a call; "" for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A service to call: its address, and the identity that its certificate must have if there is TLS."""

    address: str
    """host:port; if `balances`, it may be a list (rpc.address)."""
    role: str
    """Role in the certificate: the kind of the service."""
    name: str = ""
    """Name in the certificate; "" accepts any name of the role."""
    probes_bandwidth: bool = True
    """Whether gRPC measures the bandwidth, for large messages. It then answers each message with a ping and a timer."""
    balances: bool = False
    """Whether calls go round all servers of a list, or of a DNS name. The certificate of each is checked."""


class Channels:
    """Opens the gRPC channels of a process.

    Args:
        tls: TLS files of the process. None: channels are in plain text.
    """

    def __init__(self, tls: TlsFiles | AuthorityFile | None = None) -> None:
        self._tls = tls

    @property
    def encrypted(self) -> bool:
        """Whether channels use TLS."""
        return self._tls is not None

    def open(self, target: Target, *, max_message_mib: int = MAX_MESSAGE_MIB, api_key: ApiKey = "") -> grpc.aio.Channel:
        """Return a channel that connects on first use and reconnects within a second. The caller closes it.

        Channels that are opened after a renewal use the renewed certificate.

        Args:
            api_key: API key to send with every call that has a single request; "" for none. A function is called for
                every call, in the context of its task.

        Raises ConfigError if one channel cannot call all addresses of a list.
        """
        shown = _key_interceptors(api_key) if api_key else ()
        interceptors = (*telemetry.client_interceptors(), *shown)
        options = [*channel_options(max_message_mib), ("grpc.http2.bdp_probe", int(target.probes_bandwidth))]
        uri = target.address
        if target.balances:
            uri = grpc_target(target.address)
            if is_name(target.address) or len(split_list(target.address)) > 1:
                options = list((dict(options) | dict(_BALANCING_OPTIONS)).items())
        if self._tls is None:
            return grpc.aio.insecure_channel(uri, options=options, interceptors=interceptors)
        return grpc.aio.secure_channel(
            uri,
            self._tls.channel_credentials(),
            options=[*options, *_expecting(target)],
            interceptors=interceptors,
        )

    def open_blocking(self, target: Target) -> grpc.Channel:
        """Return a channel for calls without asyncio."""
        options = channel_options()
        if self._tls is None:
            return grpc.insecure_channel(target.address, options=options)
        credentials = self._tls.channel_credentials()
        return grpc.secure_channel(target.address, credentials, options=[*options, *_expecting(target)])


PLAINTEXT = Channels()


def open_channel(address: str, *, max_message_mib: int = MAX_MESSAGE_MIB, api_key: str = "") -> grpc.aio.Channel:
    """Return a channel in plain text; see Channels.open."""
    return PLAINTEXT.open(Target(address=address, role=Role.LOCAL), max_message_mib=max_message_mib, api_key=api_key)


def channel_options(max_message_mib: int = MAX_MESSAGE_MIB) -> list[tuple[str, int | str]]:
    """Return the options of every channel, for code that opens one itself."""
    return [
        ("grpc.max_receive_message_length", max_message_mib << 20),
        ("grpc.max_send_message_length", max_message_mib << 20),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        # A peer that vanished silently is noticed after 30 + 10 s; leases notice it earlier. Without data in between,
        # gRPC would send two pings and then one a minute; our servers allow more (rpc.server).
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Channels share no connection, so that the back-off of one does not delay another.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _expecting(target: Target) -> list[tuple[str, int | str]]:
    """Return the option with which gRPC checks the certificate for the service's name instead of a host name."""
    return [("grpc.ssl_target_name_override", dns_name(target.role, target.name))]


def _key_interceptors(key: ApiKey) -> Sequence[grpc.aio.ClientInterceptor]:
    """Return interceptors that add an API key to calls with a single request. The gateway's API has no others."""
    key_of_call = key if callable(key) else lambda: key
    return [_ShowsToUnary(key_of_call), _ShowsToStreams(key_of_call)]


class _ShowsToUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, key_of_call: Callable[[], str]) -> None:
        self._key_of_call = key_of_call

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with(self._key_of_call(), client_call_details), request)


class _ShowsToStreams(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, key_of_call: Callable[[], str]) -> None:
        self._key_of_call = key_of_call

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with(self._key_of_call(), client_call_details), request)


def _with(key: str, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
    if not key:
        return details
    return grpc.aio.ClientCallDetails(
        method=details.method,
        timeout=details.timeout,
        metadata=grpc.aio.Metadata(*(details.metadata or ()), bearer(key)),
        credentials=details.credentials,
        wait_for_ready=details.wait_for_ready,
    )
