"""The scrape targets of the fleet, for Prometheus' HTTP service discovery.

Services other than the gateway have their metrics on a port that the system picks, so they cannot be configured.
Format: https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from bottega.rpc.address import split
from bottega.v1.fleet_pb2 import Registration

TARGETS_PATH = "/targets"
"""Path of the targets, beside the gateway's own /metrics."""

# Hosts that mean every address of the machine; such a service is scraped at the host of its calls.
_EVERYWHERE = frozenset({"0.0.0.0", "[::]"})


def scrape_targets(registrations: Iterable[Registration]) -> str:
    """Return the targets as JSON: a group of one target for each service that has metrics.

    Its labels are its kind as `service` and its name as `instance`, which stay the same when it is started again and
    listens elsewhere.
    """
    groups = [
        {"targets": [_reachable(service)], "labels": {"service": service.kind, "instance": service.name}}
        for service in registrations
        if service.metrics_address
    ]
    return json.dumps(groups)


def _reachable(registration: Registration) -> str:
    host, port = split(registration.metrics_address)
    if host in _EVERYWHERE:
        host, _ = split(registration.address)
    return f"{host}:{port}"
