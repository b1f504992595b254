"""The metrics of a ControlNet server: loaded and requested ControlNets, forward passes, and connections.

This module imports neither the engine nor gRPC.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bottega.rpc.operation.metrics import counters, device_metrics, gauge_by, gauges, link_metrics
from bottega.v1 import hosted_pb2
from bottega.v1.controlnet_engine_pb2 import ControlNetEngineBeat


class ControlNetMetrics(Collector):
    """The metrics, registered once in the server's registry. Counters of the engine restart at 0 with a new engine.

    The server sets `memory_bytes` at every measurement, and `budget_bytes` once.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._beat = ControlNetEngineBeat()
        self.memory_bytes = Gauge(
            "bottega_controlnet_memory_bytes",
            "Resident bytes of the ControlNet server and its child processes.",
            registry=registry,
        )
        self.budget_bytes = Gauge(
            "bottega_controlnet_budget_bytes", "Upper bound on the bytes of loaded weights.", registry=registry
        )
        self._restarts = Counter(
            "bottega_controlnet_engine_restarts", "Engine processes that were lost.", registry=registry
        )
        registry.register(self)

    def on_beat(self, beat: ControlNetEngineBeat) -> None:
        """Update the metrics with the engine's newest heartbeat."""
        self._beat = beat

    def on_engine_lost(self) -> None:
        """Count an engine that died, hung or failed to start."""
        self._restarts.inc()
        self.on_beat(ControlNetEngineBeat())

    def collect(self) -> Iterator[Metric]:
        """Yield the counters and states that the engine reported last."""
        beat = self._beat
        yield from counters(
            "bottega_controlnet",
            ("hits", "Sessions that found their ControlNet loaded.", beat.hits),
            ("misses", "Sessions that did not find their ControlNet loaded.", beat.misses),
            ("loads", "ControlNets that were loaded.", beat.loads),
            ("load_failures", "Loads of ControlNets that failed.", beat.failures),
            ("evictions", "ControlNets that were evicted.", beat.evictions),
            ("forwards", "Forwards.", beat.turns),
            ("rows", "Batch rows of all forward passes.", beat.rows),
            ("forward_seconds", "Seconds that forward passes took.", beat.forward_s),
        )
        yield from gauges("bottega_controlnet", ("weights_bytes", "Bytes of loaded weights.", beat.used_bytes))
        yield from link_metrics(beat.links)
        yield from device_metrics(beat.device_memory)
        nets, loaded = beat.controlnets, hosted_pb2.HOSTED_STATE_LOADED
        for name, text, values in (
            ("popularity", "Number of recent sessions that used it.", {net.name: net.popularity for net in nets}),
            ("sessions", "Open sessions of the ControlNet.", {net.name: net.sessions for net in nets}),
            ("loaded", "1 if the weights are in memory, else 0.", {net.name: int(net.state == loaded) for net in nets}),
        ):
            yield gauge_by("controlnet", f"bottega_controlnet_{name}", text, values)
