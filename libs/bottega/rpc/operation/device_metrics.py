"""Metrics of an engine's device memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from bottega.rpc.operation.metric_families import gauge_by, gauges
from bottega.v1.device_pb2 import DeviceMemory


def device_metrics(memory: DeviceMemory) -> Iterator[Metric]:
    """Yield metrics of the last report of a service's engine. On a CPU there is no budget, and the values are 0."""
    text = "Bytes of the device that are set aside, by what for."
    yield gauge_by("holder", "bottega_device_held_bytes", text, memory.held_bytes)
    yield from gauges(
        "bottega_device",
        ("budget_bytes", "Bytes of the device that the engine may have; 0 on a CPU.", memory.budget_bytes),
        ("allocated_bytes", "Bytes of the device that the engine's tensors take; 0 on a CPU.", memory.allocated_bytes),
        ("free_bytes", "Bytes of the device that no process has; 0 on a CPU.", memory.free_bytes),
    )
