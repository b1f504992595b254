"""Channels to Bottega's services: message limits, keepalive, quick reconnecting."""

from __future__ import annotations

import grpc

from bottega.rpc import telemetry
from bottega.rpc.security.key_calls import key_interceptors

# An input image of 8 MiB with a mask and a few control images; as in ServerConfig.
MAX_MESSAGE_MIB = 24

# BottegaError's details travel in trailers; gRPC's own bound of 8 KiB is near for long lists.
MAX_METADATA_BYTES = 64 * 1024


def open_channel(address: str, *, max_message_mib: int = MAX_MESSAGE_MIB, api_key: str = "") -> grpc.aio.Channel:
    """A channel that connects when it is first used and reconnects within a second. Close it.

    api_key: shown with every call of one request; empty is none.
    """
    shown = key_interceptors(api_key) if api_key else ()
    interceptors = (*telemetry.client_interceptors(), *shown)
    return grpc.aio.insecure_channel(address, options=channel_options(max_message_mib), interceptors=interceptors)


def channel_options(max_message_mib: int = MAX_MESSAGE_MIB) -> list[tuple[str, int]]:
    """The options of `open_channel`, for those who open a blocking channel."""
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
