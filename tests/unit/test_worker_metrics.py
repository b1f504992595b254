"""What a worker's metrics say of its engine."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from bottega.v1.fleet_pb2 import StepTime
from bottega.worker.metrics import WorkerMetrics


def test_sizes_that_the_engine_has_forgotten_leave_no_series() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    for side in range(1, 100):
        metrics.step_times([StepTime(latent_height=side, latent_width=side, rows=rows, seconds=0.5) for rows in (1, 2)])
    (family,) = [family for family in registry.collect() if family.name == "bottega_worker_step_seconds"]
    assert {tuple(sample.labels.values()): sample.value for sample in family.samples} == {
        ("99x99", "1"): 0.5,
        ("99x99", "2"): 0.5,
    }
