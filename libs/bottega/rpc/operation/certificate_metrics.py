"""When a service's certificate expires, for alerts."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from bottega.rpc.security.tls import TlsFiles


class CertificateMetrics(Collector):
    """Of the files as they are now: a certificate that was renewed counts at once."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The moment, in Unix seconds."""
        expires = "When the certificate of this service expires, in seconds since 1970."
        yield GaugeMetricFamily(
            "bottega_certificate_expires_timestamp_seconds", expires, value=self._files.material.expires_wall
        )
