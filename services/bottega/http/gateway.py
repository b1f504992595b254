"""The client of the gateway that all requests share. Each call carries the API key of the request that makes it."""

from __future__ import annotations

import hashlib
import time
from contextvars import ContextVar

import grpc
from grpc_health.v1 import health_pb2

from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.transport.calls import RetryPolicy
from bottega.client.transport.connection import GatewayConnection
from bottega.client.transport.credentials import BoundedChannels
from bottega.client.transport.watching import CancelOnExit
from bottega.errors import ConfigError, Forbidden, Unauthenticated
from bottega.http.config import HttpConfig
from bottega.rpc.channel import Target
from bottega.rpc.security.api_keys import parse_key, shown_key
from bottega.rpc.security.caller import Role
from bottega.rpc.security.tls import TlsFiles

_HEALTH_S = 2.0
# Seconds for which a key that the gateway has accepted is not checked again, and an upper bound on such keys.
_ACCEPTED_S = 5.0
_MOST_ACCEPTED = 4096

_key: ContextVar[str] = ContextVar("API key of a request", default="")


def bind_key(authorization: str) -> None:
    """Set the API key of the request that this task serves, from its header `authorization`.

    OpenAI's clients always send a key. One that is not Bottega's is left out, and a gateway with tenants refuses that.
    """
    shown = shown_key(authorization)
    _key.set(shown if parse_key(shown) else "")


def bound_key() -> str:
    """Return the API key of the request that this task serves; "" if it has none."""
    return _key.get()


class GatewayOpen(ConfigError):
    """The error that the network can reach this service, and the gateway behind it serves anyone."""


class ForwardingClient(AsyncGatewayClient):
    """The SDK's calls to the gateway over one connection, for callers that each have a key of their own.

    Make it in a running event loop, and close it.

    Args:
        tls: TLS files of this process; None for connections that are not encrypted.
    """

    def __init__(self, config: HttpConfig, tls: TlsFiles | None) -> None:
        self._connection = GatewayConnection(
            config.gateway,
            fleet_address=config.fleet or None,
            api_key=_key.get,
            channels=BoundedChannels(tls),
            timeout_s=config.request_s,
            retry=RetryPolicy(patience_s=config.gateway_wait_s, reach_s=config.gateway_wait_s),
        )
        self._cancel_on_exit = CancelOnExit(self._connection.images)
        self._asks_for_keys = False
        self._accepted_until: dict[bytes, float] = {}  # by hash of the key, the oldest first
        target = Target(address=config.gateway, role=Role.GATEWAY, balances=True)
        self._channel = self._connection.channels.open(target)

    async def is_serving(self) -> bool:
        """Return whether the gateway can be reached, and its health is good."""
        check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_S)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def check_keys(self) -> None:
        """Raise GatewayOpen if the gateway serves callers without a key, Unavailable if it is away.

        Calls the gateway each time until it has refused such a call once.
        """
        if self._asks_for_keys:
            return
        key = _key.set("")
        try:
            await self.models()
        except (Unauthenticated, Forbidden):
            self._asks_for_keys = True
            return
        finally:
            _key.reset(key)
        raise GatewayOpen(
            "server.listen can be reached from the network, and the gateway asks its callers for no API key: give it"
            " tenants (bottega tenants), or set server.insecure: true if the network is trusted"
        )

    async def check_key(self) -> None:
        """Raise the gateway's error if it refuses the bound API key. Keys that it has just accepted are not sent."""
        digest, now = hashlib.sha256(bound_key().encode()).digest(), time.monotonic()
        if now < self._accepted_until.get(digest, 0.0):
            return
        await self.models()
        self._accepted_until.pop(digest, None)
        self._accepted_until[digest] = now + _ACCEPTED_S
        if len(self._accepted_until) > _MOST_ACCEPTED:
            del self._accepted_until[next(iter(self._accepted_until))]

    async def close(self) -> None:
        """Cancel unfinished requests, then close the connections."""
        await super().close()
        await self._channel.close()
