"""Channels to Bottega's services: whom they trust, message limits, keepalive, quick reconnecting."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from bottega.rpc import telemetry
from bottega.rpc.security.caller import Role
from bottega.rpc.security.identity import dns_name
from bottega.rpc.security.key_calls import key_interceptors
from bottega.rpc.security.tls import AuthorityFile, TlsFiles

# An input image of 8 MiB with a mask and a few control images; as in ServerConfig.
MAX_MESSAGE_MIB = 24

# BottegaError's details travel in trailers; gRPC's own bound of 8 KiB is near for long lists.
MAX_METADATA_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a channel goes, and who must be there. address: host:port. role: as certificates have it, which is the kind
    of a service. name: empty is any of the role.

    Without TLS whoever is there is believed.
    """

    address: str
    role: str
    name: str = ""


class Channels:
    """Opens channels for one process. tls: its files; without any, channels are in plain text."""

    def __init__(self, tls: TlsFiles | AuthorityFile | None = None) -> None:
        self._tls = tls

    @property
    def encrypted(self) -> bool:
        """Whether channels use TLS."""
        return self._tls is not None

    def open(self, target: Target, *, max_message_mib: int = MAX_MESSAGE_MIB, api_key: str = "") -> grpc.aio.Channel:
        """A channel that connects when it is first used and reconnects within a second. Close it.

        api_key: shown with every call of one request; empty is none. A certificate that is renewed counts for channels
        that are opened afterwards.
        """
        shown = key_interceptors(api_key) if api_key else ()
        interceptors = (*telemetry.client_interceptors(), *shown)
        options = channel_options(max_message_mib)
        if self._tls is None:
            return grpc.aio.insecure_channel(target.address, options=options, interceptors=interceptors)
        return grpc.aio.secure_channel(
            target.address,
            self._tls.channel_credentials(),
            options=[*options, *_expecting(target)],
            interceptors=interceptors,
        )

    def open_blocking(self, target: Target) -> grpc.Channel:
        """The same, for calls without asyncio."""
        options = channel_options()
        if self._tls is None:
            return grpc.insecure_channel(target.address, options=options)
        credentials = self._tls.channel_credentials()
        return grpc.secure_channel(target.address, credentials, options=[*options, *_expecting(target)])


PLAINTEXT = Channels()


def open_channel(address: str, *, max_message_mib: int = MAX_MESSAGE_MIB, api_key: str = "") -> grpc.aio.Channel:
    """One in plain text; see Channels.open."""
    return PLAINTEXT.open(Target(address=address, role=Role.LOCAL), max_message_mib=max_message_mib, api_key=api_key)


def channel_options(max_message_mib: int = MAX_MESSAGE_MIB) -> list[tuple[str, int | str]]:
    """The options of every channel, for those who open one of another kind."""
    return [
        ("grpc.max_receive_message_length", max_message_mib << 20),
        ("grpc.max_send_message_length", max_message_mib << 20),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        # A peer that vanished without a word is noticed after 30 + 10 seconds; leases notice earlier. Without data in
        # between gRPC would send two of these pings, and then one a minute; our servers tolerate more (rpc.server).
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Channels share no connection, so that one's back-off does not delay another's.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _expecting(target: Target) -> list[tuple[str, int | str]]:
    """gRPC checks that the certificate has this name, which is none of a host: services may move."""
    return [("grpc.ssl_target_name_override", dns_name(target.role, target.name))]
