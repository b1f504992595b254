"""Prometheus metrics of one process, served over HTTP on loopback.

A registry of its own for every server, so that several may live in one process.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

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
from bottega.rpc.address import split
from bottega.rpc.operation import logs
from bottega.rpc.operation.metrics_http import MetricsHttpServer

# From a health check to the longest drawing that anybody waits for.
_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class CallMetrics:
    """Calls by method and code, and how long they took."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._in_flight = Gauge("bottega_rpc_in_flight", "Calls being served.", registry=registry)
        self._calls = Counter("bottega_rpc_calls", "Calls by method and code.", ("method", "code"), registry=registry)
        self._seconds = Histogram(
            "bottega_rpc_seconds", "Seconds that a call took.", ("method",), buckets=_SECONDS_BUCKETS, registry=registry
        )

    def on_start(self) -> None:
        """A call is being served."""
        self._in_flight.inc()

    def on_end(self, method: str, code: str, seconds: float) -> None:
        """It has ended."""
        self._in_flight.dec()
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)


class MetricsEndpoint:
    """`/metrics` over HTTP, and pages beside it, in a thread of its own."""

    def __init__(self, listen: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(_DroppedLines())
        self.calls = CallMetrics(self.registry)
        self.address = ""
        self._metrics: WSGIApplication = make_wsgi_app(self.registry)
        self._pages: dict[str, Callable[[], str]] = {}
        self._listen = listen
        self._http: MetricsHttpServer | None = None

    def add_page(self, path: str, render: Callable[[], str]) -> None:
        """Serves JSON at a path. render: called for every request, in the endpoint's thread. Before start."""
        self._pages[path] = render

    def start(self) -> None:
        """Starts to serve; `address` then says where. Raises Unavailable when the port is taken."""
        host, port = split(self._listen)
        try:
            self._http = MetricsHttpServer(host, port, self._answer)
        except OSError as error:
            key = f"server.metrics_listen {self._listen}"
            if error.errno == errno.EADDRINUSE:
                raise Unavailable(f"{key} cannot be used: is another instance running?") from None
            raise Unavailable(f"{key} cannot be used: {error.strerror}") from None
        self._http.start()
        self.address = f"{host}:{self._http.port}"

    def stop(self) -> None:
        """Stops to serve; blocks for a moment. Harmless when it has stopped."""
        if self._http is not None:
            http, self._http = self._http, None
            http.stop()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """A page of that path, else the metrics, whatever the path."""
        render = self._pages.get(environ["PATH_INFO"])
        if render is None:
            return self._metrics(environ, start_response)
        body = render().encode()
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]


class _DroppedLines(Collector):
    """Read at each scrape: a process that drops lines has no time for more than a sum."""

    def collect(self) -> Iterable[Metric]:
        """The number of this moment."""
        said = "Log lines that this process dropped because nobody read its stderr."
        yield CounterMetricFamily("bottega_log_lines_dropped", said, value=logs.dropped_lines())
