"""The server of every service: gRPC with health, reflection, metrics and a graceful end.

Services add their servicers to `Server.grpc`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from bottega.errors import ConfigError, Unavailable
from bottega.rpc import telemetry
from bottega.rpc.address import is_loopback, split
from bottega.rpc.channel import MAX_MESSAGE_MIB, Channels
from bottega.rpc.connection_limits import ConnectionGuard, connection_bounds
from bottega.rpc.interceptor.call_interceptor import CallInterceptor, RequestQuotas
from bottega.rpc.interceptor.call_limits import CallLimit, ResponseFlowControl
from bottega.rpc.interceptor.calls import CallLimits
from bottega.rpc.interceptor.connection_ledger import ConnectionLedger
from bottega.rpc.interceptor.memory_quota import MemoryQuota
from bottega.rpc.operation.audit import AuditLog
from bottega.rpc.operation.metrics import CallMetrics, CertificateMetrics, MetricsEndpoint
from bottega.rpc.operation.sd_notify import SystemdNotifier
from bottega.rpc.security.caller import AllLocal, CallAuthenticator, CertificateAuthenticator
from bottega.rpc.security.tls import TlsFiles
from bottega.rpc.server_config import PLAIN_TEXT, ListenerConfig, ServerConfig, open_metrics_text, open_port_text

# Seconds for clients that watch the health to switch to another service before calls are refused.
_DRAIN_PAUSE_S = 0.2
# Seconds for cancelled calls to end, after the grace period.
_STOP_GRACE_S = 0.5
# gRPC's limit on all calls, in multiples of max_calls and max_streams: those that may be served, which are four kinds
# of unary calls and one of streams, and once more the most frequent kind of each, for answers that are not read yet.
# Dropped calls of muted connections, of which gRPC's queue had _MAX_PENDING at most, last until these are ended.
_MOST_CALLS, _MOST_STREAMS = 5, 2
# Calls of one method in gRPC's queue. gRPC cuts off further calls without a status, those of tenants too. So the queue
# has room for what a flood from 50 connections brings before the connection guard ends it. A call takes 12 KiB.
_MAX_PENDING = 32_768
# Open calls of one connection, besides the streams that it may have, and the least number. A client waits with further
# calls, and gRPC refuses them if it does not. So the calls of one connection never delay others for long.
_CALLS_BESIDE_STREAMS = 128
_LEAST_CALLS = 640
# Metadata of one call as gRPC counts it: a key, trace ids, and what proxies add.
_METADATA_BYTES = 16 << 10
# Small requests that arrive at once. Each takes a millisecond; a slower one may turn out to be large.
_SMALL_AT_ONCE = 4
# Allows two of one host and one of one connection.
_SMALL_SHARE = 0.7
_SMALL_CONTENDED_S = 0.25
# Time for the handshake of a connection, and for a connection without calls. Clients reconnect by themselves.
_HANDSHAKE_MS = 10_000
_IDLE_MS = 300_000
# A message that is too large by at most this is refused with our error; a larger one with gRPC's.
_REFUSABLE_BYTES = 1 << 20

_log = logging.getLogger(__name__)

Step = Callable[[], Awaitable[None]]


class GrpcListener:
    """A gRPC server on one port, with health, reflection and limits of its own.

    Create it in a running event loop, add servicers to `grpc`, and call `start`.

    Args:
        name: Key in the service's configuration; "" for the service's main listener.
        authenticator: Identifies callers. None: client certificates identify them, and without TLS nothing does.
        tls: TLS files of the process; None for plain text.
        audit: Log of the calls that change something; None for none.
    """

    def __init__(
        self,
        config: ListenerConfig,
        metrics: CallMetrics,
        *,
        name: str = "",
        authenticator: CallAuthenticator | None = None,
        tls: TlsFiles | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        self.listener_name = name
        self._tls = tls
        self._config = config
        if authenticator is None and tls is not None and config.client_certificates:
            authenticator = CertificateAuthenticator()
        self._authenticates = authenticator is not None
        self.address = ""
        self._listen = config.listen
        responses = ResponseFlowControl(max_bytes=config.max_answers_mib << 20, wait_s=config.answer_wait_s)
        limits, ledger = _call_limits(config), ConnectionLedger()
        self._interceptor = CallInterceptor(
            metrics,
            config.default_deadline_s,
            requests=_request_quotas(config),
            responses=responses,
            limits=limits,
            ledger=ledger,
            authenticator=authenticator or AllLocal(),
            audit=audit,
        )
        bounds = connection_bounds(config.max_connections)
        self._connections = ConnectionGuard(
            max_connections=bounds.guarded, share=config.peer_share, busy=limits.connections, ledger=ledger
        )
        self._guarding = contextlib.AsyncExitStack()
        self._health = health.aio.HealthServicer()
        self._serving: bool | None = None
        self._services: list[str] = []
        # gRPC's own limits do not tell callers when to retry, so they are above those of the interceptor.
        self.grpc = grpc.aio.server(
            interceptors=[self._interceptor, *telemetry.server_interceptors()],
            options=_options(config, max_connections=bounds.accepted),
            maximum_concurrent_rpcs=_MOST_CALLS * config.max_calls + _MOST_STREAMS * config.max_streams + _MAX_PENDING,
        )

    def add_services(self, names: Sequence[str]) -> None:
        """Register full names of services, as in DESCRIPTOR, for health and reflection. Call it before `start`."""
        self._services.extend(names)

    async def start(self) -> None:
        """Start to listen. Health is NOT_SERVING until `set_serving`. Raises Unavailable if a port is in use."""
        host, _ = split(self._listen)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        if self._config.reflection:
            own = [health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection([*self._services, *own], self.grpc)
        await self.set_serving(False)
        port = self._bind()
        await self.grpc.start()
        await self._guarding.enter_async_context(self._connections.looking(port))
        self.address = f"{host}:{port}"

    async def set_serving(self, serving: bool) -> None:
        """Set whether grpc.health.v1 says SERVING."""
        if serving is self._serving:
            return
        self._serving = serving
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def wait_idle(self) -> None:
        """Wait until no call is being served, except for gRPC's own services."""
        await self._interceptor.calls.wait_idle()

    async def stop(self) -> None:
        """Stop the listener at once, and cancel running calls. A second call does nothing."""
        await self._guarding.aclose()
        await self.grpc.stop(_STOP_GRACE_S)
        self._interceptor.calls.errors.sum_up()

    def _bind(self) -> int:
        self._check_exposure()
        try:
            if self._tls is None:
                return self.grpc.add_insecure_port(self._listen)
            credentials = self._tls.server_credentials(client_certificates=self._config.client_certificates)
            return self.grpc.add_secure_port(self._listen, credentials)
        except RuntimeError:
            key = f"{self.listener_name or 'server'}.listen"
            raise Unavailable(f"{key} {self._listen} cannot be used: is another instance running?") from None

    def _check_exposure(self) -> None:
        """Raise ConfigError if unauthenticated hosts could call the port, unless the configuration allows it."""
        if is_loopback(self._listen) or (self._tls is not None and self._authenticates):
            return
        key = f"{self.listener_name or 'server'}.listen"
        open_to = "its callers are not authenticated" if self._tls else PLAIN_TEXT
        if not self._config.insecure:
            raise ConfigError(open_port_text(key, self._listen, open_to))
        _log.warning(
            "a port that does not authenticate callers is open to the network",
            extra={"listener": key, "listen": self._listen, "why": open_to},
        )


class Server(GrpcListener):
    """The server of a service: its main listener, further listeners, metrics, and a graceful end of all of them.

    Create it in a running event loop, add servicers to `grpc`, and call `start`.

    Args:
        name: Name of the service in messages to users.
        authenticator: Authenticator of the main listener; see GrpcListener.
    """

    def __init__(self, name: str, config: ServerConfig, *, authenticator: CallAuthenticator | None = None) -> None:
        self.name = name
        self.config = config
        self._metrics = MetricsEndpoint(config.metrics_listen)
        self._systemd = SystemdNotifier(os.environ)
        tls = TlsFiles(config.tls) if config.tls.given else None
        self.channels = Channels(tls)
        self.identity = tls.material.identity if tls is not None else None
        self._audit = AuditLog(Path(config.audit).expanduser(), service=name) if config.audit else None
        super().__init__(config, self._metrics.calls, authenticator=authenticator, tls=tls, audit=self._audit)
        if tls is not None:
            self._metrics.registry.register(CertificateMetrics(tls))
        self._beside: list[GrpcListener] = []
        self._draining = False

    @property
    def registry(self) -> CollectorRegistry:
        """Registry for the service's own metrics."""
        return self._metrics.registry

    @property
    def metrics_address(self) -> str:
        """host:port of `/metrics`, once started."""
        return self._metrics.address

    def add_page(self, path: str, render: Callable[[], str]) -> None:
        """Serve a page of JSON on the port of `/metrics`. Call it before `start`.

        Args:
            render: Called for every request, in another thread.
        """
        self._metrics.add_page(path, render)

    @property
    def addresses(self) -> dict[str, str]:
        """host:port of all listeners and of the metrics, by name, once started."""
        beside = {listener.listener_name: listener.address for listener in self._beside}
        return {"address": self.address, "metrics": self.metrics_address, **beside}

    def beside(self, config: ListenerConfig, *, name: str) -> GrpcListener:
        """Add a listener that starts, drains and ends with this server, and return it. Call it before `start`."""
        listener = GrpcListener(config, self._metrics.calls, name=name, tls=self._tls, audit=self._audit)
        self._beside.append(listener)
        return listener

    async def start(self) -> None:
        """Start all listeners; see GrpcListener."""
        if (refusal := open_metrics_text(self.config)) is not None:
            raise ConfigError(refusal)
        self._metrics.start()
        await super().start()
        for listener in self._beside:
            await listener.start()

    def extend_start(self, status: str, *, within_s: float) -> None:
        """Report the progress of the start to systemd, and in how many seconds the next report comes."""
        self._systemd.extend_start(status, within_s=within_s)

    async def set_serving(self, serving: bool) -> None:
        """Set whether grpc.health.v1 says SERVING, on all listeners. Once a drain has begun, it says NOT_SERVING."""
        serving = serving and not self._draining
        for listener in self._beside:
            await listener.set_serving(serving)
        await super().set_serving(serving)

    async def drain(self, finish: Step | None = None) -> None:
        """End gracefully: set health to NOT_SERVING, pause, call `finish`, and wait for running calls within the grace.

        Args:
            finish: What the service itself does in a drain. It must end streams that would not end by themselves.
        """
        self._draining = True
        await self.set_serving(False)
        await asyncio.sleep(_DRAIN_PAUSE_S)
        try:
            async with asyncio.timeout(self.config.drain_grace_s):
                if finish is not None:
                    await finish()
                await asyncio.gather(self.wait_idle(), *(listener.wait_idle() for listener in self._beside))
        except TimeoutError:
            _log.warning(
                "the drain took longer than drain_grace_s; calls that still run are cancelled",
                extra={"grace_s": self.config.drain_grace_s},
            )
        await self.stop()

    async def stop(self) -> None:
        """End all listeners now and cancel running calls. A second call does nothing."""
        await asyncio.gather(super().stop(), *(listener.stop() for listener in self._beside))
        await asyncio.to_thread(self._metrics.stop)
        if self._audit is not None:
            await asyncio.to_thread(self._audit.close)


def _request_quotas(config: ListenerConfig) -> RequestQuotas:
    """Return the quotas of a port. gRPC receives messages of up to max_message_mib, whatever their method."""
    message_bytes = config.max_message_mib << 20

    def all_requests() -> MemoryQuota:
        max_bytes = config.max_requests_mib << 20
        return MemoryQuota(max_bytes=max_bytes, message_bytes=message_bytes, share=config.peer_share)

    def small(share: float) -> MemoryQuota:
        max_bytes = _SMALL_AT_ONCE * message_bytes
        return MemoryQuota(
            max_bytes=max_bytes, message_bytes=message_bytes, share=share, contended_s=_SMALL_CONTENDED_S
        )

    # Health and reflection are open to all, and a reflection stream may be silent while no call waits.
    return RequestQuotas(
        large=all_requests(),
        small=small(max(config.peer_share, _SMALL_SHARE)),
        streamed=all_requests(),
        of_grpc=small(1.0),
    )


def _call_limits(config: ListenerConfig) -> CallLimits:
    def calls() -> CallLimit:
        return CallLimit(max_calls=config.max_calls, share=config.peer_share, limit="max_calls")

    streams = CallLimit(max_calls=config.max_streams, share=config.peer_share, limit="max_streams")
    return CallLimits(short=calls(), streams=streams, streamed=calls(), of_grpc=calls(), of_grpc_streams=calls())


def most_calls_of_connection(config: ListenerConfig) -> int:
    """Return how many calls gRPC accepts at once over one connection: its streams, and some others."""
    streams = math.ceil(config.peer_share**2 * config.max_streams)
    return max(_LEAST_CALLS, streams + _CALLS_BESIDE_STREAMS)


def _options(config: ListenerConfig, *, max_connections: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_allowed_incoming_connections", max_connections),
        # Calls that are not served yet. By default gRPC cuts off some of a burst of a thousand, which callers mistake
        # for a cancelled job. Between the first limit and the second it would cut off calls at random.
        ("grpc.server.max_pending_requests", max(_MAX_PENDING, config.max_calls)),
        ("grpc.server.max_pending_requests_hard_limit", max(_MAX_PENDING, config.max_calls)),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        # A connection with an open call is not idle.
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.max_receive_message_length", (config.max_message_mib << 20) + _REFUSABLE_BYTES),
        # Answers with lists may be longer than requests.
        ("grpc.max_send_message_length", max(config.max_message_mib, MAX_MESSAGE_MIB) << 20),
        ("grpc.max_concurrent_streams", most_calls_of_connection(config)),
        # gRPC would refuse some calls at random above the first limit, and all above the second.
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
        # Receive only 64 KiB of a message that is not read yet. With the probe it would be some MiB of every call.
        ("grpc.http2.bdp_probe", 0),
        # A second instance on the same port must fail, not share the port silently.
        ("grpc.so_reuseport", 0),
        # Clients ping every 30 s. The server allows that (gRPC's default is 5 minutes), and pings as well.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]
