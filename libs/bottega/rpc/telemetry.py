"""Exports spans of calls and jobs with OpenTelemetry.

It needs the extra `bottega-libs[otel]`, and is off unless `OTEL_EXPORTER_OTLP_ENDPOINT`, or the same variable for
traces, names a collector. The other variables of OpenTelemetry's SDK and OTLP exporter work too: headers, certificates,
samplers, batches. The standard instrumentation of gRPC traces calls, and connects them across services by
`traceparent`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Environment variables that turn the export on."""

# Methods that are not traced, because their calls last for days.
_UNTRACED_METHODS = ("Join", "WatchCheckpoints")
# Seconds to send the last spans when a service ends. A missing collector must not delay a drain.
_FLUSH_S = 2.0

_log = logging.getLogger(__name__)


class _Telemetry:
    """The OpenTelemetry exporter of this process."""

    def __init__(self) -> None:
        self.provider: Any = None
        self.exporter: Any = None


_active = _Telemetry()


@contextlib.contextmanager
def exporting(service: str) -> Iterator[None]:
    """Export calls and jobs while the block runs, if an environment variable names a collector.

    Args:
        service: Name of this process in the traces.
    """
    endpoint = next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), "")
    if not endpoint:
        yield
        return
    try:
        _active.provider, _active.exporter = _provider(service)
    except ImportError as error:
        _log.error(
            "OpenTelemetry is configured but not installed: pip install 'bottega-libs[otel]'",
            extra={"endpoint": endpoint, "missing": error.name},
        )
        yield
        return
    try:
        yield
    finally:
        provider, _active.provider = _active.provider, None
        # The provider has no time-out for its last spans: it tries for as long as the exporter does, which is 10 s.
        give_up = threading.Timer(_FLUSH_S, _active.exporter.shutdown)
        give_up.daemon = True
        give_up.start()
        provider.shutdown()
        give_up.cancel()


def server_interceptors() -> Sequence[grpc.aio.ServerInterceptor]:
    """Return OpenTelemetry's interceptors for a server, to be placed after its own."""
    if _active.provider is None:
        return ()
    from opentelemetry.instrumentation.grpc import aio_server_interceptor

    return (aio_server_interceptor(tracer_provider=_active.provider, filter_=_filter()),)


def client_interceptors() -> Sequence[grpc.aio.ClientInterceptor]:
    """Return OpenTelemetry's interceptors for a channel."""
    if _active.provider is None:
        return ()
    from opentelemetry.instrumentation.grpc import aio_client_interceptors

    return tuple(aio_client_interceptors(tracer_provider=_active.provider, filter_=_filter()))


def tracer() -> Tracer | None:
    """Return the tracer for spans other than calls, or None if nothing is exported."""
    return None if _active.provider is None else _active.provider.get_tracer("bottega")


def _provider(service: str) -> tuple[Any, Any]:
    """Return a provider of tracers, and its exporter."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": f"bottega-{service}"}))
    exporter = OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter


def _filter() -> Any:
    from grpc_reflection.v1alpha import reflection
    from opentelemetry.instrumentation.grpc import filters

    methods: list[Any] = [filters.method_name(name) for name in _UNTRACED_METHODS]
    reflects: Any = filters.service_name(reflection.SERVICE_NAME)
    return filters.negate(filters.any_of(filters.health_check(), reflects, *methods))
