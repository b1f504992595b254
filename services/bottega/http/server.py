"""The HTTP server: its port, its connections and their limits, metrics, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from pathlib import Path

import uvicorn
from prometheus_client import Counter, Gauge
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from bottega.errors import ConfigError, Unavailable
from bottega.http.config import HttpConfig, read_url_key
from bottega.http.context import Context
from bottega.http.fetching import ImageFetcher
from bottega.http.gateway import ForwardingClient
from bottega.http.limits import PeerLimit
from bottega.http.pictures import UrlSeal
from bottega.http.reading import BodyReader
from bottega.http.service import HttpMetrics, application
from bottega.process.memory import MemoryMeter
from bottega.rpc.address import is_loopback, split
from bottega.rpc.channel import Channels
from bottega.rpc.fleet_membership import FleetMembership, registration_of
from bottega.rpc.operation.metrics import CertificateMetrics, MetricsEndpoint
from bottega.rpc.security.caller import Identity
from bottega.rpc.security.private_files import FileState, file_state, read_private
from bottega.rpc.security.tls import TlsFiles
from bottega.rpc.server import Step
from bottega.rpc.server_config import HttpServerConfig, refused_ports
from bottega.v1 import fleet_pb2

_HANDSHAKE_S = 10.0
_BACKLOG = 1024
_HEAD_BYTES = 32 << 10
# Seconds for cancelled requests to end, after the grace period.
_STOP_S = 1.0
# Seconds for a proxy to see that the service is not ready any more.
_DRAIN_PAUSE_S = 0.2

_log = logging.getLogger(__name__)


class HttpServer:
    """The server of the HTTP API. Create it in a running event loop; `boot` starts and ends it."""

    def __init__(self, config: HttpConfig) -> None:
        self.name = "http"
        self.config: HttpServerConfig = config.server
        self.address = ""
        tls = TlsFiles(config.server.tls) if config.server.tls.given else None
        self._tls = tls
        self._client = ForwardingClient(config, tls)
        self._membership: FleetMembership | None = None
        self._memory = MemoryMeter(lambda: [os.getpid()])
        self._metrics = MetricsEndpoint(config.server.metrics_listen)
        if tls is not None:
            self._metrics.registry.register(CertificateMetrics(tls))
        bodies = BodyReader(config.server)
        self._context = Context(
            config=config,
            client=self._client,
            bodies=bodies,
            fetcher=ImageFetcher(config.fetch, bodies, peer_share=config.server.peer_share),
            urls=UrlSeal(read_url_key(config), ttl_s=config.url_ttl_s),
            draining=asyncio.Event(),
        )
        self._is_open = not (is_loopback(config.server.listen) or config.server.insecure)
        app = application(self._context, HttpMetrics(self._metrics.registry), keys_only=self._is_open)
        self._guard = ConnectionLimits(config.server, self._metrics)
        self._uvicorn = uvicorn.Config(
            app,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(config.server.idle_s) or 1,
            h11_max_incomplete_event_size=_HEAD_BYTES,
        )
        self._state = ServerState()
        self._listener: asyncio.Server | None = None

    @property
    def addresses(self) -> dict[str, str]:
        """host:port of the port and of the metrics, once started."""
        return {"address": self.address, "metrics": self.metrics_address}

    @property
    def channels(self) -> Channels:
        """Opens the gRPC channels of the process."""
        return Channels(self._tls)

    @property
    def identity(self) -> Identity | None:
        """Identity in the service's certificate; None without TLS."""
        return self._tls.material.identity if self._tls else None

    @property
    def metrics_address(self) -> str:
        """host:port of the metrics, once started."""
        return self._metrics.address

    async def start(self) -> None:
        """Start to listen. Raise ConfigError if a port must not be opened, Unavailable if one is in use."""
        for refusal in refused_ports(self._context.config):
            raise ConfigError(refusal)
        if not is_loopback(self.config.listen) and self.config.insecure:
            _log.warning("server.insecure opens the port to the network, even without HTTPS or API keys")
        if self._is_open:
            _log.info("all calls to the gateway come from this host, so its server.peer_share should be 1.0")
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # warnings repeat what strangers send
        self._metrics.start()
        self._uvicorn.load()
        host, port = split(self.config.listen)
        try:
            bound = _bind(host, port)
        except OSError as error:
            why = f"server.listen {self.config.listen} cannot be used"
            raise Unavailable(f"{why}: is another instance running? ({error.strerror})") from None
        loop = asyncio.get_running_loop()
        context = _Certificate(self.config).context if self.config.encrypted else None
        self._listener = await loop.create_server(
            lambda: LimitedProtocol(self._uvicorn, self._state, self._guard, context), sock=bound, backlog=_BACKLOG
        )
        self.address = f"{host}:{bound.getsockname()[1]}"

    async def check_gateway(self) -> None:
        """Raise ConfigError if the network can reach the port, and the gateway asks its callers for no key.

        If the gateway is away, it is asked before the first request is served. Then join the fleet.
        """
        if self._is_open:
            with contextlib.suppress(Unavailable):
                await self._client.check_keys()
        if fleet := self._context.config.fleet:
            name = self._context.config.name or (self.identity.name if self.identity else f"http-{os.getpid()}")
            registration = registration_of(self, kind=self.name, name=name)
            self._membership = FleetMembership(fleet, registration, load=self._load, channels=self.channels)
            self._membership.start()

    def _load(self) -> fleet_pb2.Load:
        return fleet_pb2.Load(draining=self._context.draining.is_set(), memory_bytes=self._memory.resident_bytes)

    async def set_serving(self, serving: bool) -> None:
        """Set whether /readyz is good."""
        if not serving:
            self._context.draining.set()
            if self._membership is not None:
                self._membership.report_soon()

    async def drain(self, finish: Step | None = None) -> None:
        """End gracefully: /readyz says 503, streams of jobs' events end, and running requests have the grace to end."""
        await self.set_serving(False)
        await asyncio.sleep(_DRAIN_PAUSE_S)
        self._stop_listening()
        if finish is not None:
            await finish()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=self.config.drain_grace_s)
        if self._state.tasks:
            facts = {"grace_s": self.config.drain_grace_s, "requests": len(self._state.tasks)}
            _log.warning("the drain took longer than drain_grace_s; running requests are cancelled", extra=facts)
        await self.stop()

    async def stop(self) -> None:
        """End now: running requests are cancelled and get 503. A second call does nothing."""
        await self.set_serving(False)
        self._stop_listening()
        tasks = set(self._state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_S)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.to_thread(self._metrics.stop)

    async def close(self) -> None:
        """Leave the fleet, cancel unfinished jobs, and close the connection to the gateway."""
        if self._membership is not None:
            await self._membership.stop()
        await self._context.fetcher.close()
        await self._client.close()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self._state.connections):
            connection.shutdown()


class ConnectionLimits:
    """The limits of all connections, and their metrics."""

    def __init__(self, config: HttpServerConfig, metrics: MetricsEndpoint) -> None:
        self.head_wait_s = config.head_wait_s
        self.answer_wait_s = config.answer_wait_s
        self._open = PeerLimit(config.max_connections, config.peer_share)
        gauge = Gauge("bottega_http_connections", "Open connections.", registry=metrics.registry)
        gauge.set_function(lambda: self._open.used)
        self._cut = Counter(
            "bottega_http_connections_cut",
            "Connections that were closed because of a limit: refused, or slow to send (head) or to read (answer).",
            ("limit",),
            registry=metrics.registry,
        )

    def admit(self, address: str) -> bool:
        """Count a new connection. Return False if it must be closed."""
        admitted = self._open.take(address)
        if not admitted:
            self.note_cut("max_connections")
        return admitted

    def leave(self, address: str) -> None:
        """Count the end of an admitted connection."""
        self._open.give(address)

    def note_cut(self, limit: str) -> None:
        """Count a connection that was closed because of a limit."""
        self._cut.labels(limit).inc()


class LimitedProtocol(H11Protocol):
    """A connection of uvicorn that is closed if its client sends a head, or reads an answer, too slowly."""

    def __init__(
        self, config: uvicorn.Config, state: ServerState, limits: ConnectionLimits, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(config, state, {})
        self._limits = limits
        self._tls = tls
        self._address: str | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._early = b""
        """Data that came with the end of the handshake."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection before its handshake, and start to wait for the first head."""
        peer = transport.get_extra_info("peername")
        address = peer[0] if peer else ""
        if not self._limits.admit(address):
            transport.abort()
            return
        self._address, self.transport = address, transport
        if self._tls is None:
            self._begin(transport)
            return
        self.connections.add(self)
        transport.pause_reading()  # the handshake resumes it
        self._handshake = self.loop.create_task(self._secure(transport, self._tls))

    async def _secure(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        try:
            secured = await self.loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=_HANDSHAKE_S
            )
        except OSError:  # ssl.SSLError is one
            secured = None
        if secured is None:
            self._forget()
        else:
            self._begin(secured)

    def _begin(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._handshake = None
        if self._early:
            self.data_received(self._early)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self.flow is not None:  # it is None until the connection is admitted and secure
            super().connection_lost(exc)
            self._unset_keepalive_if_required()
        self._forget()

    def _forget(self) -> None:
        self.connections.discard(self)
        self._head_timer = _cancelled(self._head_timer)
        self._answer_timer = _cancelled(self._answer_timer)
        if self._address is not None:
            self._limits.leave(self._address)
            self._address = None

    def data_received(self, data: bytes) -> None:
        """Handle data, and wait for the rest of a head."""
        if self._handshake is not None:
            self._early += data
            return
        super().data_received(data)
        self._await_head()
        self._await_close()

    def pause_writing(self) -> None:
        """Start to wait for the client to read."""
        super().pause_writing()
        self._answer_timer = _cancelled(self._answer_timer)
        self._answer_timer = self.loop.call_later(self._limits.answer_wait_s, self._abort, "answer")

    def resume_writing(self) -> None:
        """Stop waiting for the client to read."""
        super().resume_writing()
        self._answer_timer = _cancelled(self._answer_timer)
        self._await_close()

    def timeout_keep_alive_handler(self) -> None:
        """Close the idle connection."""
        super().timeout_keep_alive_handler()
        self._await_close()

    def shutdown(self) -> None:
        """Close the connection, after the answer to its current request if it has one."""
        super().shutdown()
        self._await_close()

    def _await_close(self) -> None:
        """Start to wait for the client to read the rest of what was sent to it, if the connection is being closed."""
        if self.transport.is_closing() and self._answer_timer is None and self._address is not None:
            self._answer_timer = self.loop.call_later(self._limits.answer_wait_s, self._abort, "answer")

    def _await_head(self) -> None:
        if bool(self.cycle) and not self.cycle.response_complete:
            self._head_timer = _cancelled(self._head_timer)
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(self._limits.head_wait_s, self._abort, "head")

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._head_timer = _cancelled(self._head_timer)
        super().on_response_complete()
        self._await_close()

    def _abort(self, limit: str) -> None:
        self._limits.note_cut(limit)
        self.transport.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer, and return the absence of one."""
    if timer is not None:
        timer.cancel()
    return None


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.strip("[]"), port), family=family, backlog=_BACKLOG)


class _Certificate:
    """The certificate of an HTTPS port. New connections use the current files. The constructor raises ConfigError."""

    def __init__(self, config: HttpServerConfig) -> None:
        files = config.https if config.https.certificate else config.tls
        self._paths = [Path(path).expanduser() for path in (files.certificate, files.key)]
        self._states = self._states_now()
        self._current = self._read()
        self.context = self._read()
        """The context of the listener, which gives each connection the current one."""
        self.context.sni_callback = self._renew

    def _renew(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        states = self._states_now()
        if states != self._states:
            self._states = states
            try:
                self._current = self._read()
            except ConfigError as error:
                _log.error("a new certificate cannot be used; the previous one stays", extra={"text": error.message})
        connection.context = self._current

    def _states_now(self) -> list[FileState]:
        return [file_state(path) for path in self._paths]

    def _read(self) -> ssl.SSLContext:
        certificate, key = self._paths
        read_private(key)  # raises if others can read it
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"{certificate} cannot be used as the certificate of HTTPS: {error}") from None
        return context
