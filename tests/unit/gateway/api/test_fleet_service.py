"""What Prometheus is told of the services that have joined."""

from __future__ import annotations

import json

from bottega.gateway.api.fleet_service import scrape_targets
from bottega.v1.fleet_pb2 import Registration


def test_each_service_is_a_target_of_its_own_by_kind_and_name() -> None:
    joined = [
        Registration(kind="gateway", name="gateway", address="127.0.0.1:8470", metrics_address="127.0.0.1:8471"),
        Registration(kind="clock", name="without metrics", address="127.0.0.1:9"),
        Registration(kind="worker", name="w1", address="127.0.0.1:9000", metrics_address="127.0.0.1:9001"),
    ]
    assert json.loads(scrape_targets(joined)) == [
        {"targets": ["127.0.0.1:8471"], "labels": {"service": "gateway", "instance": "gateway"}},
        {"targets": ["127.0.0.1:9001"], "labels": {"service": "worker", "instance": "w1"}},
    ]


def test_metrics_at_every_address_of_a_machine_are_found_where_its_calls_go() -> None:
    for everywhere in ("0.0.0.0", "[::]"):
        elsewhere = Registration(kind="worker", name="w", address="10.0.0.7:9000", metrics_address=f"{everywhere}:9001")
        (target,) = json.loads(scrape_targets([elsewhere]))
        assert target["targets"] == ["10.0.0.7:9001"]
