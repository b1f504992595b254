"""Prometheus metrics of one process, served over HTTP on loopback.

A registry of its own for every server, so that several may live in one process. It knows no service.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    make_wsgi_app,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from bottega.errors import Unavailable
from bottega.rpc import logs
from bottega.rpc.address import split

# From a health check to the longest drawing that anybody waits for.
_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# How long stopping may take; prometheus_client's own server takes half a second.
_POLL_S = 0.05


class CallMetrics:
    """Calls by method and code, and how long they took."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._in_flight = Gauge("bottega_rpc_in_flight", "Calls being served.", registry=registry)
        self._calls = Counter("bottega_rpc_calls", "Calls by method and code.", ("method", "code"), registry=registry)
        self._seconds = Histogram(
            "bottega_rpc_seconds", "Seconds that a call took.", ("method",), buckets=_SECONDS_BUCKETS, registry=registry
        )

    def watch_in_flight(self, count: Callable[[], float]) -> None:
        """Where to read how many calls are being served."""
        self._in_flight.set_function(count)

    def observe(self, method: str, code: str, seconds: float) -> None:
        """Counts one call that has ended."""
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)


class MetricsEndpoint:
    """`/metrics` over HTTP, in a thread of its own."""

    def __init__(self, listen: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(_DroppedLines())
        self.calls = CallMetrics(self.registry)
        self.address = ""
        self._listen = listen
        self._http: tuple[WSGIServer, threading.Thread] | None = None

    def start(self) -> None:
        """Starts to serve; `address` then says where. Raises Unavailable when the port is taken."""
        host, port = split(self._listen)
        try:
            server = make_server(host, port, make_wsgi_app(self.registry), _Server, _Silent)
        except OSError as error:
            raise Unavailable(f"metrics_listen {self._listen} cannot be used: {error.strerror}") from None
        thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
        thread.start()
        self._http = (server, thread)
        self.address = f"{host}:{server.server_port}"

    def stop(self) -> None:
        """Stops to serve; blocks for up to 50 ms."""
        if self._http is None:
            return
        server, thread = self._http
        self._http = None
        server.shutdown()
        server.server_close()
        thread.join()


class _DroppedLines(Collector):
    """Read when somebody scrapes: whoever drops lines has no time for more than a sum."""

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        said = "Log lines that this process dropped because nobody read its stderr."
        yield CounterMetricFamily("bottega_log_lines_dropped", said, value=logs.dropped_lines())


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""
