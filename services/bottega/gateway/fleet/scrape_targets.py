"""Where Prometheus finds the metrics of every service that has joined, as its HTTP service discovery reads it.

Services but the gateway have their metrics on a port that the system picks: nobody writes their addresses down.
Format: https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from bottega.rpc.address import split
from bottega.v1.fleet_pb2 import Registration

TARGETS_PATH = "/targets"
"""Beside the gateway's own /metrics."""

# Where a service listens at every address of its machine: it is found where its calls go.
_EVERYWHERE = frozenset({"0.0.0.0", "[::]"})


def scrape_targets(registrations: Iterable[Registration]) -> str:
    """JSON: a group of one target for each service that has metrics, with its kind as `service` and its name as
    `instance`, which stay the same when it is started again and listens elsewhere."""
    groups = [
        {"targets": [_reachable(each)], "labels": {"service": each.kind, "instance": each.name}}
        for each in registrations
        if each.metrics_address
    ]
    return json.dumps(groups)


def _reachable(registration: Registration) -> str:
    host, port = split(registration.metrics_address)
    if host in _EVERYWHERE:
        host, _ = split(registration.address)
    return f"{host}:{port}"
