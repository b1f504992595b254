"""OpenTelemetry: spans of calls and jobs go to a collector, where OpenTelemetry's own variables name one.

It is an extra (`bottega-libs[otel]`), and off without `OTEL_EXPORTER_OTLP_ENDPOINT`, or the same for traces alone. The
other variables of its SDK and of its OTLP exporter count as well: headers, certificates, samplers, batches. Calls are
traced by its standard instrumentation of gRPC, and belong together across services by its `traceparent`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The variables that turn it on."""

# They last for days.
_UNTRACED_METHODS = ("Join", "WatchCheckpoints")
# For what has not been sent when a service ends: a collector that is away holds up no drain.
_FLUSH_MS = 2000

_log = logging.getLogger(__name__)


class _Telemetry:
    """What this process exports with."""

    def __init__(self) -> None:
        self.provider: Any = None


_active = _Telemetry()


@contextlib.contextmanager
def exporting(service: str) -> Iterator[None]:
    """Within it calls and jobs are exported, where a variable says where to. service: as what this process is known."""
    endpoint = next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), "")
    if not endpoint:
        yield
        return
    try:
        _active.provider = _provider(service)
    except ImportError as error:
        _log.error(
            "OpenTelemetry is asked for and not installed: pip install 'bottega-libs[otel]'",
            extra={"endpoint": endpoint, "missing": error.name},
        )
        yield
        return
    try:
        yield
    finally:
        provider, _active.provider = _active.provider, None
        provider.force_flush(_FLUSH_MS)
        provider.shutdown()


def server_interceptors() -> Sequence[grpc.aio.ServerInterceptor]:
    """For a server, behind its own: what they refuse is no call."""
    if _active.provider is None:
        return ()
    from opentelemetry.instrumentation.grpc import aio_server_interceptor

    return (aio_server_interceptor(tracer_provider=_active.provider, filter_=_filter()),)


def client_interceptors() -> Sequence[grpc.aio.ClientInterceptor]:
    """For a channel."""
    if _active.provider is None:
        return ()
    from opentelemetry.instrumentation.grpc import aio_client_interceptors

    return tuple(aio_client_interceptors(tracer_provider=_active.provider, filter_=_filter()))


def tracer() -> Tracer | None:
    """For spans that are no calls; None where nothing is exported."""
    return None if _active.provider is None else _active.provider.get_tracer("bottega")


def _provider(service: str) -> Any:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": f"bottega-{service}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _filter() -> Any:
    from grpc_reflection.v1alpha import reflection
    from opentelemetry.instrumentation.grpc import filters

    methods: list[Any] = [filters.method_name(name) for name in _UNTRACED_METHODS]
    reflects: Any = filters.service_name(reflection.SERVICE_NAME)
    return filters.negate(filters.any_of(filters.health_check(), reflects, *methods))
