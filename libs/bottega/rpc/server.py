"""The server of every service: gRPC with health, reflection, metrics and a graceful end.

Services register their servicers on `Server.grpc`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry
from pydantic import ConfigDict, Field

from bottega.errors import ConfigError, Unavailable
from bottega.rpc import telemetry
from bottega.rpc.address import Address, is_loopback, split
from bottega.rpc.channel import MAX_MESSAGE_MIB, Channels
from bottega.rpc.connection_limits import ConnectionGuard, connection_bounds
from bottega.rpc.interceptor.call_interceptor import CallInterceptor, RequestQuotas
from bottega.rpc.interceptor.call_limits import CallLimit
from bottega.rpc.interceptor.calls import CallLimits
from bottega.rpc.interceptor.connection_ledger import ConnectionLedger
from bottega.rpc.interceptor.memory_quota import MemoryQuota
from bottega.rpc.interceptor.response_flow import ResponseFlowControl
from bottega.rpc.operation.audit import AuditLog
from bottega.rpc.operation.certificate_metrics import CertificateMetrics
from bottega.rpc.operation.metrics import CallMetrics, MetricsEndpoint
from bottega.rpc.operation.sd_notify import SystemdNotifier
from bottega.rpc.security.caller import AllLocal, CallAuthenticator
from bottega.rpc.security.certificate_calls import CertificateAuthenticator
from bottega.rpc.security.tls import TlsConfig, TlsFiles
from bottega.strict import STRICT

# For clients that watch health to go elsewhere before anything is refused.
_DRAIN_PAUSE_S = 0.2
# After the grace: for calls to end that were told to.
_STOP_GRACE_S = 0.5
# gRPC's bound on all calls, in times max_calls and max_streams: all that may be served, which are four kinds of short
# calls and one of streams, and as many again of the most frequent, whose answers are not read out.
_MOST_CALLS, _MOST_STREAMS = 5, 2
# Calls that wait to be looked at, beyond which gRPC cuts off more and more; it would begin with 1,000. All wait in one
# line, of which a service looks at some thousand in a second: more than may be served are only in the way.
_LEAST_PENDING = 4_096
# Calls of one connection that are open at once, beside the streams that it may have, and at least: a client waits with
# more, and what comes all the same gRPC refuses itself. So calls of one connection are never long in the way of others.
_CALLS_BESIDE_STREAMS = 128
_LEAST_CALLS = 640
# Of one call, as gRPC counts them: a key, ids of traces, and whatever else a proxy adds.
_METADATA_BYTES = 16 << 10
# Small requests that are coming in: each is here within a millisecond, and one that is not may turn out to be large.
_SMALL_AT_ONCE = 4
# Two of one host, one of one connection.
_SMALL_SHARE = 0.7
_SMALL_CONTENDED_S = 0.25
# For a connection to become one of HTTP/2, and for one without calls: clients connect again by themselves.
_HANDSHAKE_MS = 10_000
_IDLE_MS = 300_000
# By which a message may be too large and is refused in our words; one that is larger is refused in gRPC's.
_REFUSABLE_BYTES = 1 << 20
_PLAIN = "it is not encrypted (no server.tls)"

_log = logging.getLogger(__name__)

Step = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerConfig:
    """Settings of one listener (port) of a service."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    listen: Address = "127.0.0.1:0"
    """Address of the listener, host:port. Port 0 takes any free port."""
    max_message_mib: Annotated[int, Field(ge=1, le=1024)] = MAX_MESSAGE_MIB
    """Bound on one message in MiB."""
    max_requests_mib: Annotated[int, Field(ge=1)] = 128
    """Bound in MiB on requests with images that are being received or processed.

    The service grows by up to five times that. One host (one tenant, if there are tenants) may use peer_share of it.
    Streamed requests (members of the fleet, uploads) have as much room again, and small requests have room of their
    own.
    """
    max_calls: Annotated[int, Field(ge=1)] = 2048
    """Bound on unary calls (GetJob, SubmitJob, ...) that are served at once.

    Health and reflection, and calls that stream requests, may be as many again.
    """
    max_streams: Annotated[int, Field(ge=1)] = 2048
    """Bound on calls that stream answers (WatchJob, Generate) and are open at once.

    They take no room of unary calls. As many ended calls of each kind may wait for callers that do not read; each takes
    up to a third of a MiB. A call without room gets RESOURCE_EXHAUSTED and a time to try again.
    """
    peer_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of each of these bounds that one host may use.

    One connection may use that share of the host's: by default a host 1,024 and a connection 512 of 2,048 streams.
    Hosts get less while others use much, so that a new host finds room. A host with a proxy, or with hundreds of
    waiting callers, needs more max_streams, or 1.0: then one host may use everything.
    """
    max_connections: Annotated[int, Field(ge=1)] = 4096
    """Bound on open connections, each with up to 640 calls; at most a quarter of the limit of open files.

    If one host has more than peer_share of them, its connections without calls are closed. A connection without calls
    is closed after some minutes, and at once if its host makes more than 250 calls a second without being known. Such a
    host is kept out for 10 s, unless a known caller used it within the last hour. With a peer_share of 1.0 no host is
    kept out: it may be a proxy.
    """
    max_answers_mib: Annotated[int, Field(ge=1)] = 64
    """Bound in MiB on large answers (images that travel with events) that callers have not read yet.

    The service grows by up to four times that. Beyond it, images are sent only to callers that fetch them.
    """
    insecure: bool = False
    """Listen where the network can reach it although callers are not identified.

    That is without TLS, or with neither client certificates nor API keys. The service does not start otherwise.
    """
    client_certificates: bool = True
    """With TLS, require a client certificate of the authority.

    Set false for a gateway whose callers use API keys instead.
    """
    reflection: bool = True
    """Let callers list the methods, as grpcurl does."""
    answer_wait_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds for a caller to read an answer of a stream, else its call ends with UNAVAILABLE.

    It is 5 s while other callers are refused because of it. A caller that reads and waits for news is not affected. The
    answer of a unary call stays until the caller's deadline or until its connection ends.
    """
    default_deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline in seconds of calls whose caller sets none."""

    def __post_init__(self) -> None:
        if self.max_requests_mib < self.max_message_mib:
            needed = f"at least max_message_mib, which is {self.max_message_mib}"
            raise ValueError(f"max_requests_mib is {self.max_requests_mib}; {needed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(ListenerConfig):
    """Settings of a service's server: its own listener, its metrics, its log and its end."""

    metrics_listen: Address = "127.0.0.1:0"
    """Address of the metrics over HTTP, host:port.

    Port 0 takes any free port. Metrics are never encrypted; off loopback they need insecure: true.
    """
    tls: TlsConfig = field(default_factory=TlsConfig)
    """TLS files of the service, for all its listeners and for its own calls."""
    audit: str = ""
    """File that receives a line of JSON for each call that changes something: caller, method, time and outcome.

    It stays below about 600 MB. Empty: no audit.
    """
    drain_grace_s: Annotated[float, Field(gt=0)] = 20.0
    """Seconds for running calls to end after SIGTERM. TimeoutStopSec of the unit is longer."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""


def refused_ports(config: object) -> list[str]:
    """Why a service with this configuration would open none of its ports, as far as the file alone says it.

    Whether callers show API keys, which counts with TLS, is known only to the service.
    """
    found = {field.name: getattr(config, field.name) for field in fields(config)}  # type: ignore[arg-type]
    server = found.get("server")
    if not isinstance(server, ServerConfig):
        return []
    listeners = {name: value for name, value in found.items() if isinstance(value, ListenerConfig)}
    refusals = [
        _open_port(f"{name}.listen", listener.listen, _PLAIN)
        for name, listener in listeners.items()
        if not (server.tls.given or listener.insecure or is_loopback(listener.listen))
    ]
    return [*refusals, *filter(None, [_open_metrics(server)])]


def _open_port(key: str, listen: str, open_to: str) -> str:
    return (
        f"{key} {listen} can be reached from the network, and {open_to}: give it certificates (bottega certs), or say"
        " insecure: true beside it where the network is trusted"
    )


def _open_metrics(config: ServerConfig) -> str | None:
    if config.insecure or is_loopback(config.metrics_listen):
        return None
    return (
        f"server.metrics_listen {config.metrics_listen} can be reached from the network, and metrics are not encrypted:"
        " say server.insecure: true where the network is trusted"
    )


class GrpcListener:
    """One port: a gRPC server with health, reflection and budgets of its own. Add servicers to `grpc`, then `start`.

    Made in a running event loop. name: its key in the service's configuration; the service's own has none.
    authenticator: says who calls; without one it is whom a certificate names, and without TLS nobody is asked.
    tls: the files of the process. audit: where calls that change something are noted, if anywhere.
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
        self._asks = authenticator is not None
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
            most=bounds.guarded, share=config.peer_share, busy=limits.connections, ledger=ledger
        )
        self._guarding = contextlib.AsyncExitStack()
        self._health = health.aio.HealthServicer()
        self._services: list[str] = []
        # gRPC's own refusals say nothing of when to ask again: they are for what the interceptor does not count.
        self.grpc = grpc.aio.server(
            interceptors=[self._interceptor, *telemetry.server_interceptors()],
            options=_options(config, max_connections=bounds.accepted),
            maximum_concurrent_rpcs=_MOST_CALLS * config.max_calls + _MOST_STREAMS * config.max_streams,
        )

    def add_services(self, names: Sequence[str]) -> None:
        """Names the services (full names, as DESCRIPTOR has them) for health and reflection. Before start."""
        self._services.extend(names)

    async def start(self) -> None:
        """Listens; health says NOT_SERVING until `set_serving`. Raises Unavailable when a port is taken."""
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
        """Says by grpc.health.v1 whether new work is welcome."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def wait_idle(self) -> None:
        """Returns when no call is being served, gRPC's own aside."""
        await self._interceptor.calls.wait_idle()

    async def stop(self) -> None:
        """Ends now; calls in flight are cancelled. Harmless when it has ended."""
        await self._guarding.aclose()
        await self.grpc.stop(_STOP_GRACE_S)
        self._interceptor.calls.errors.sum_up()

    def _bind(self) -> int:
        """The port. The only place where one is bound."""
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
        """Raises ConfigError where strangers could call, unless the configuration says that they may."""
        if is_loopback(self._listen) or (self._tls is not None and self._asks):
            return
        key = f"{self.listener_name or 'server'}.listen"
        open_to = "nobody who calls is asked who they are" if self._tls else _PLAIN
        if not self._config.insecure:
            raise ConfigError(_open_port(key, self._listen, open_to))
        _log.warning("a port is open to the network", extra={"listener": key, "listen": self._listen, "why": open_to})


class Server(GrpcListener):
    """The server of one service: its own listener, others beside it, metrics, and a graceful end of them all.

    Made in a running event loop; add servicers to `grpc`, then `start`. name: of the service, for people. `registry` is
    where its own metrics belong. authenticator: of its own port; see GrpcListener.
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

    @property
    def registry(self) -> CollectorRegistry:
        """Where the service registers its own metrics."""
        return self._metrics.registry

    @property
    def metrics_address(self) -> str:
        """host:port of `/metrics`, once started."""
        return self._metrics.address

    def add_page(self, path: str, render: Callable[[], str]) -> None:
        """Serves JSON beside `/metrics`. render: called for every request, in a thread of its own. Before start."""
        self._metrics.add_page(path, render)

    @property
    def addresses(self) -> dict[str, str]:
        """host:port of everything that it listens on, once started, by what it is."""
        beside = {listener.listener_name: listener.address for listener in self._beside}
        return {"address": self.address, "metrics": self.metrics_address, **beside}

    def beside(self, config: ListenerConfig, *, name: str) -> GrpcListener:
        """Another port, which starts, serves, drains and ends together with this server. Before start."""
        listener = GrpcListener(config, self._metrics.calls, name=name, tls=self._tls, audit=self._audit)
        self._beside.append(listener)
        return listener

    async def start(self) -> None:
        """Listens everywhere; see GrpcListener."""
        if (refusal := _open_metrics(self.config)) is not None:
            raise ConfigError(refusal)
        self._metrics.start()
        await super().start()
        for listener in self._beside:
            await listener.start()

    def extend_start(self, status: str, *, within_s: float) -> None:
        """Tell systemd how far the start is, and that the next word comes within so many seconds."""
        self._systemd.extend_start(status, within_s=within_s)

    async def set_serving(self, serving: bool) -> None:
        """Says by grpc.health.v1, on every port, whether new work is welcome."""
        for listener in self._beside:
            await listener.set_serving(serving)
        await super().set_serving(serving)

    async def drain(self, finish: Step | None = None) -> None:
        """Ends gracefully: health down, a pause, `finish`, then what is still in flight, all within the grace.

        finish: the service's own part; when it returns, streams of the service that would never end by
        themselves must have been told to.
        """
        await self.set_serving(False)
        await asyncio.sleep(_DRAIN_PAUSE_S)
        try:
            async with asyncio.timeout(self.config.drain_grace_s):
                if finish is not None:
                    await finish()
                await asyncio.gather(self.wait_idle(), *(listener.wait_idle() for listener in self._beside))
        except TimeoutError:
            _log.warning("drain took longer than its grace", extra={"grace_s": self.config.drain_grace_s})
        await self.stop()

    async def stop(self) -> None:
        """Ends now, on every port; calls in flight are cancelled. Harmless when it has ended."""
        await asyncio.gather(super().stop(), *(listener.stop() for listener in self._beside))
        await asyncio.to_thread(self._metrics.stop)
        if self._audit is not None:
            await asyncio.to_thread(self._audit.close)


def _request_quotas(config: ListenerConfig) -> RequestQuotas:
    """Quotas of a port. gRPC takes in a message of up to max_message_mib, whatever its method, before it is here."""
    message_bytes = config.max_message_mib << 20

    def all_requests() -> MemoryQuota:
        max_bytes = config.max_requests_mib << 20
        return MemoryQuota(max_bytes=max_bytes, message_bytes=message_bytes, share=config.peer_share)

    def small(share: float) -> MemoryQuota:
        max_bytes = _SMALL_AT_ONCE * message_bytes
        return MemoryQuota(
            max_bytes=max_bytes, message_bytes=message_bytes, share=share, contended_s=_SMALL_CONTENDED_S
        )

    # Health and reflection are open to all, and a conversation of reflection may be silent as long as nobody waits.
    return RequestQuotas(
        large=all_requests(),
        small=small(max(config.peer_share, _SMALL_SHARE)),
        streamed=all_requests(),
        of_grpc=small(1.0),
    )


def _call_limits(config: ListenerConfig) -> CallLimits:
    def calls() -> CallLimit:
        return CallLimit(most=config.max_calls, share=config.peer_share, limit="max_calls")

    streams = CallLimit(most=config.max_streams, share=config.peer_share, limit="max_streams")
    return CallLimits(short=calls(), streams=streams, streamed=calls(), of_grpc=calls(), of_grpc_streams=calls())


def most_calls_of_connection(config: ListenerConfig) -> int:
    """Return how many calls gRPC takes at once over one connection: the streams that it may have, and some beside."""
    streams = math.ceil(config.peer_share**2 * config.max_streams)
    return max(_LEAST_CALLS, streams + _CALLS_BESIDE_STREAMS)


def _options(config: ListenerConfig, *, max_connections: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_allowed_incoming_connections", max_connections),
        # Of calls that are not served yet: gRPC would cut off some of a burst of a thousand without an error, which
        # callers take for a cancelled job.
        ("grpc.server.max_pending_requests", max(_LEAST_PENDING, config.max_calls)),
        ("grpc.server.max_pending_requests_hard_limit", 2 * max(_LEAST_PENDING, config.max_calls)),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        # One with a call counts as used, however long there is no news.
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.max_receive_message_length", (config.max_message_mib << 20) + _REFUSABLE_BYTES),
        # What is listed may be longer than what is asked.
        ("grpc.max_send_message_length", max(config.max_message_mib, MAX_MESSAGE_MIB) << 20),
        ("grpc.max_concurrent_streams", most_calls_of_connection(config)),
        # Above the first gRPC would refuse some calls at random, and all above the second.
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
        # Of a message that is not read yet, 64 KiB are received; with the probe it would be some MiB of every call.
        ("grpc.http2.bdp_probe", 0),
        # A second instance on the same port is an error, not a silent sharing of it.
        ("grpc.so_reuseport", 0),
        # Clients ping every 30 s; the server tolerates that, where gRPC's own bound is 5 minutes, and pings as well.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]
