"""Prometheus metrics of a process, and the HTTP server for scraping them.

Every server has its own registry, so that several can run in one process. The HTTP server runs in one thread, in which
no slow or silent client delays others: a request is passed to the WSGI application only when it is complete, and the
time and number of connections are limited. (prometheus_client's server has a thread per connection and no limits.)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from wsgiref.simple_server import WSGIRequestHandler
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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bottega.errors import Unavailable
from bottega.rpc.address import split
from bottega.rpc.operation import logs
from bottega.rpc.security.tls import TlsFiles
from bottega.transport import LinkCounters
from bottega.v1.device_pb2 import DeviceMemory
from bottega.v1.link_pb2 import LinkCounts

# In seconds, from a health check to the longest request for an image.
_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Upper bound on open connections; the oldest is closed for a new one. Few clients scrape a service at once.
MAX_CONNECTIONS = 64
# Upper bound on the seconds of a connection, until its answer is read.
CONNECTION_S = 5.0
_HEAD_BYTES = 16 << 10
_END_OF_HEAD = b"\r\n\r\n"
_STOP_S = 5.0


class CallMetrics:
    """Metrics of calls: their number by method and code, and their duration."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._in_flight = Gauge("bottega_rpc_in_flight", "Calls that are being served.", registry=registry)
        self._calls = Counter("bottega_rpc_calls", "Calls by method and code.", ("method", "code"), registry=registry)
        self._seconds = Histogram(
            "bottega_rpc_seconds", "Duration of calls.", ("method",), buckets=_SECONDS_BUCKETS, registry=registry
        )

    def on_start(self) -> None:
        """Count a call that starts."""
        self._in_flight.inc()

    def on_end(self, method: str, code: str, seconds: float) -> None:
        """Count a call that has ended."""
        self._in_flight.dec()
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)


class MetricsEndpoint:
    """The HTTP endpoint of a process, served by a thread: `/metrics` and pages of JSON."""

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
        """Serve JSON at a path. Call it before start.

        Args:
            render: Called for every request, in the endpoint's thread.
        """
        self._pages[path] = render

    def start(self) -> None:
        """Start to serve, and set `address`. Raises Unavailable if the port is in use."""
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
        """Stop serving. Blocks for a moment. A second call does nothing."""
        if self._http is not None:
            http, self._http = self._http, None
            http.stop()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Return the page at the path, or the metrics for every other path."""
        render = self._pages.get(environ["PATH_INFO"])
        if render is None:
            return self._metrics(environ, start_response)
        body = render().encode()
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]


class CertificateMetrics(Collector):
    """The expiry time of a service's certificate, for alerts. A renewed certificate is seen at once."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files

    def collect(self) -> Iterable[Metric]:
        """Yield the Unix time of the expiry in seconds."""
        expires = "Unix time at which the certificate of this service expires."
        yield GaugeMetricFamily(
            "bottega_certificate_expires_timestamp_seconds", expires, value=self._files.material.expires_wall
        )


class _DroppedLines(Collector):
    """The number of log lines that were dropped, read at each scrape."""

    def collect(self) -> Iterable[Metric]:
        text = "Log lines that this process dropped because its stderr was not read fast enough."
        yield CounterMetricFamily("bottega_log_lines_dropped", text, value=logs.dropped_lines())


class MetricsHttpServer:
    """An HTTP server for a WSGI application. The constructor binds the port, and raises OSError."""

    def __init__(self, host: str, port: int, application: WSGIApplication) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        self.port = int(self._socket.getsockname()[1])
        self._application = application
        self._open: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._loop = asyncio.new_event_loop()
        self._serves = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Start the server's thread. Blocks until it has started, so that `stop` can end it."""
        self._thread.start()
        self._serves.wait(_STOP_S)

    def stop(self) -> None:
        """End the server and its connections. Call it once, after `start`."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, sock=self._socket, limit=_HEAD_BYTES)
            )
            self._loop.call_soon(self._serves.set)
            self._loop.run_forever()
            server.close()
            for writer in self._open:
                writer.transport.abort()
            self._loop.run_until_complete(_cancel(asyncio.all_tasks(self._loop)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            # The request is invalid or late, or the client is gone.
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(CONNECTION_S):
                    head = await reader.readuntil(_END_OF_HEAD)
                    client = writer.get_extra_info("peername") or ("", 0)  # none if the client is gone
                    writer.write(answered(head, client, self._application))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()


def answered(head: bytes, client: tuple[str, int], application: WSGIApplication) -> bytes:
    """Return the application's answer to a request without a body, in the standard library's HTTP format."""
    answer = io.BytesIO()
    _MetricsRequest(head, answer, client, application)
    return answer.getvalue()


class _MetricsRequest(WSGIRequestHandler):
    """A request whose head is complete. The constructor handles it."""

    def __init__(self, head: bytes, answer: io.BytesIO, client: tuple[str, int], application: WSGIApplication) -> None:
        self._head, self._answer = head, answer
        server = SimpleNamespace(base_environ={}, get_app=lambda: application)
        super().__init__(None, client, server)  # type: ignore[arg-type]  # neither a socket nor a server is needed

    def setup(self) -> None:
        """Use buffers instead of a socket's files."""
        self.rfile, self.wfile = io.BufferedReader(io.BytesIO(self._head)), self._answer

    def finish(self) -> None:
        """Leave the buffers open: the server closes the connection."""

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the standard library's log line for each request."""


async def _cancel(tasks: Iterable[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def counters(prefix: str, *rows: tuple[str, str, float]) -> Iterator[Metric]:
    """Yield a counter for each row: name without prefix, help text, value."""
    for name, text, value in rows:
        yield CounterMetricFamily(f"{prefix}_{name}", text, value=value)


def gauges(prefix: str, *rows: tuple[str, str, float]) -> Iterator[Metric]:
    """Yield a gauge for each row: name without prefix, help text, value."""
    for name, text, value in rows:
        yield GaugeMetricFamily(f"{prefix}_{name}", text, value=value)


def counter_by(label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with a label. `values` has a count for each value of the label."""
    return _with_label(CounterMetricFamily(name, text, labels=(label,)), values)


def gauge_by(label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with a label. `values` has an amount for each value of the label."""
    return _with_label(GaugeMetricFamily(name, text, labels=(label,)), values)


def _with_label(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for value, amount in values.items():
        family.add_metric((value,), amount)
    return family


def totals(counter: Counter) -> Mapping[str, float]:
    """Return the values of a counter with one label, by label value."""
    (family,) = counter.collect()
    return {
        value: sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
        for value in sample.labels.values()
    }


def count_and_sum(histogram: Histogram) -> tuple[int, float]:
    """Return the count and the sum of a histogram's observations. The histogram must have no labels."""
    (family,) = histogram.collect()
    values = {sample.name.removeprefix(family.name): sample.value for sample in family.samples if not sample.labels}
    return int(values["_count"]), values["_sum"]


def link_counts(counters: LinkCounters, *, open_links: int) -> LinkCounts:
    """Convert the counters of a process's links to their message."""
    now = counters.snapshot()
    return LinkCounts(
        open=open_links,
        sent_messages=now.sent.messages,
        sent_bytes=now.sent.size_bytes,
        sent_s=now.sent.seconds,
        sent_file_bytes=now.sent.file_bytes,
        received_messages=now.received.messages,
        received_bytes=now.received.size_bytes,
        received_s=now.received.seconds,
        received_file_bytes=now.received.file_bytes,
        credit_wait_s=now.credit_wait_s,
        no_credit=now.no_credit,
        aborted=now.aborted,
        deaths=now.deaths,
    )


def link_metrics(counts: LinkCounts) -> Iterator[Metric]:
    """Yield metrics of links from the last report of a service's engine. A new engine starts at 0."""
    yield from gauges("bottega", ("links", "Tensor links that are open.", counts.open))
    for name, text, sent, received in (
        ("messages", "Complete messages over tensor links.", counts.sent_messages, counts.received_messages),
        ("bytes", "Bytes of complete messages over tensor links.", counts.sent_bytes, counts.received_bytes),
        (
            "file_bytes",
            "Bytes of files that messages shared as memory instead of copying.",
            counts.sent_file_bytes,
            counts.received_file_bytes,
        ),
        ("seconds", "Seconds that complete messages took over tensor links.", counts.sent_s, counts.received_s),
    ):
        yield counter_by("direction", f"bottega_link_{name}", text, {"sent": sent, "received": received})
    yield from counters(
        "bottega_link",
        ("credit_wait_seconds", "Seconds that senders waited for a free receive buffer.", counts.credit_wait_s),
        ("no_credit", "Waits for a free receive buffer that timed out.", counts.no_credit),
        ("aborted", "Messages that were withdrawn before they were sent.", counts.aborted),
    )
    yield counter_by("cause", "bottega_link_deaths", "Tensor links that ended, by cause.", counts.deaths)


def device_metrics(memory: DeviceMemory) -> Iterator[Metric]:
    """Yield metrics of the device from the last report of a service's engine. All are 0 on a CPU."""
    text = "Bytes of device memory that are reserved, by purpose."
    yield gauge_by("holder", "bottega_device_held_bytes", text, memory.held_bytes)
    text = "Bytes of pinned host memory that are kept for the device, by purpose."
    yield gauge_by("holder", "bottega_device_host_bytes", text, memory.host_bytes)
    yield from gauges(
        "bottega_device",
        ("budget_bytes", "Upper bound on the device memory of the engine; 0 on a CPU.", memory.budget_bytes),
        ("allocated_bytes", "Device memory that the engine's tensors use; 0 on a CPU.", memory.allocated_bytes),
        ("free_bytes", "Bytes of device memory that no process uses; 0 on a CPU.", memory.free_bytes),
    )
