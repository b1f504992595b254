"""The metrics of a ControlNet server: loaded and requested ControlNets, forwards, and links.

The module imports neither the engine nor gRPC.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bottega.rpc.operation.metric_families import counters, gauge_by, gauges
from bottega.rpc.operation.readings import device_metrics, link_metrics
from bottega.v1 import hosted_pb2
from bottega.v1.controlnet_engine_pb2 import ControlNetEngineBeat


class ControlNetMetrics(Collector):
    """The metrics, registered once on the server's registry. Counters of the engine restart at 0 with a new engine.

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
            "bottega_controlnet_budget_bytes", "Bytes that weights in memory may have.", registry=registry
        )
        self._restarts = Counter("bottega_controlnet_engine_restarts", "Engines that were lost.", registry=registry)
        registry.register(self)

    def on_beat(self, beat: ControlNetEngineBeat) -> None:
        """Update the metrics by the engine's newest heartbeat."""
        self._beat = beat

    def on_engine_lost(self) -> None:
        """Count an engine that died, hung or did not start."""
        self._restarts.inc()
        self.on_beat(ControlNetEngineBeat())

    def collect(self) -> Iterator[Metric]:
        """Yield the counters and states that the engine has last reported."""
        beat = self._beat
        yield from counters(
            "bottega_controlnet",
            ("hits", "Sessions that found their ControlNet loaded.", beat.hits),
            ("misses", "Sessions that did not find their ControlNet loaded.", beat.misses),
            ("loads", "ControlNets that were loaded.", beat.loads),
            ("load_failures", "Loads that failed.", beat.failures),
            ("evictions", "ControlNets that were evicted.", beat.evictions),
            ("forwards", "Forwards.", beat.turns),
            ("rows", "Rows of forwards.", beat.rows),
            ("forward_seconds", "Seconds of forwards.", beat.forward_s),
        )
        yield from gauges("bottega_controlnet", ("weights_bytes", "Bytes of weights in memory.", beat.used_bytes))
        yield from link_metrics(beat.links)
        yield from device_metrics(beat.device_memory)
        nets, loaded = beat.controlnets, hosted_pb2.HOSTED_STATE_LOADED
        for name, text, values in (
            ("popularity", "Sessions among the newest remembered ones.", {net.name: net.popularity for net in nets}),
            ("sessions", "Sessions that are open.", {net.name: net.sessions for net in nets}),
            ("loaded", "Whether the weights are in memory.", {net.name: int(net.state == loaded) for net in nets}),
        ):
            yield gauge_by("controlnet", f"bottega_controlnet_{name}", text, values)
