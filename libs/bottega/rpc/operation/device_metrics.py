"""Metrics of an engine's device memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from bottega.v1.device_pb2 import DeviceMemory


def device_metrics(memory: DeviceMemory) -> Iterator[Metric]:
    """Yield metrics of the last report of a service's engine. On a CPU there is no budget, and the values are 0."""
    held = GaugeMetricFamily(
        "bottega_device_held_bytes", "Bytes of the device that are set aside, by what for.", labels=("holder",)
    )
    for holder, size_bytes in memory.held_bytes.items():
        held.add_metric((holder,), size_bytes)
    yield held
    for name, text, value in (
        ("budget", "Bytes of the device that the engine may have; 0 on a CPU.", memory.budget_bytes),
        ("allocated", "Bytes of the device that the engine's tensors take; 0 on a CPU.", memory.allocated_bytes),
        ("free", "Bytes of the device that no process has; 0 on a CPU.", memory.free_bytes),
    ):
        yield GaugeMetricFamily(f"bottega_device_{name}_bytes", text, value=value)
