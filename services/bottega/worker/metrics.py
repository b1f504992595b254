"""The Prometheus metrics of a worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bottega.rpc.operation.metrics import counters, device_metrics, link_metrics, totals
from bottega.v1.engine_pb2 import EngineBeat
from bottega.v1.fleet_pb2 import Acceleration, Activity
from bottega.v1.generation_pb2 import LoraUse, StageTime

_CODEC_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_GROUP_BUCKETS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)
# From passing on a small image to denoising a large one.
_STAGE_BUCKETS = (0.001, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
# From a LoRA in memory to one that is fetched from a slow store.
_LORA_BUCKETS = (0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60)

# Outcomes that do not count as failures. The second one is the reason of JobCancelled.
_COMPLETED, _CANCELLED = "completed", "job_cancelled"


class _Engine(Collector):
    """The metrics of the engine's newest heartbeat. The counters start again at 0 with every new engine."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.beat = EngineBeat()
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield from link_metrics(self.beat.links)
        yield from device_metrics(self.beat.device_memory)
        yield from counters(
            "bottega_worker",
            ("turns", "Turns: forward passes of a batch.", self.beat.turns),
            (
                "turn_requests",
                "Requests summed over all forward passes. Divided by bottega_worker_turns: the mean batch size.",
                self.beat.steps,
            ),
        )
        for metric in self.beat.metrics:
            family = CounterMetricFamily if metric.counts else GaugeMetricFamily
            yield family(metric.name, metric.text, value=metric.value)
        counts = CounterMetricFamily(
            "bottega_worker_addon_events", "Events that add-ons of the engine have counted.", labels=("kind", "event")
        )
        for count in self.beat.counts:
            counts.add_metric((count.kind, count.event), count.count)
        yield counts
        # Callers choose the sizes, so sizes that the engine no longer reports must disappear.
        step_seconds = GaugeMetricFamily(
            "bottega_worker_step_seconds",
            "Measured seconds of one forward pass, by latent size and batch rows.",
            labels=("latent", "rows"),
        )
        for time in self.beat.step_times:
            step_seconds.add_metric((f"{time.latent_width}x{time.latent_height}", str(time.rows)), time.seconds)
        yield step_seconds


class WorkerMetrics:
    """The worker's metrics, registered once in the registry of the server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._attempts = Counter(
            "bottega_worker_attempts", "Attempts that ended, by outcome.", ("outcome",), registry=registry
        )
        self._running = Gauge("bottega_worker_running", "Attempts that have not ended.", registry=registry)
        self._steps = Counter("bottega_worker_steps", "Denoising steps done.", registry=registry)
        self._group = Histogram(
            "bottega_worker_group_requests",
            "Mean number of requests in the batches of an attempt.",
            buckets=_GROUP_BUCKETS,
            registry=registry,
        )
        self._stages = Histogram(
            "bottega_worker_stage_seconds",
            "Seconds of each stage of completed attempts, as in their provenance.",
            ("stage",),
            buckets=_STAGE_BUCKETS,
            registry=registry,
        )
        self._codec = Histogram(
            "bottega_worker_codec_seconds",
            "Seconds of decoding or encoding one image.",
            ("work",),
            buckets=_CODEC_BUCKETS,
            registry=registry,
        )
        self._lora_load, self._lora_wait, self._lora_patch = (
            Histogram(f"bottega_worker_lora_{what}_seconds", text, buckets=_LORA_BUCKETS, registry=registry)
            for what, text in (
                ("load", "Seconds until a LoRA had arrived at the worker."),
                ("wait", "Seconds that an attempt with LoRAs waited for them."),
                ("patch", "Seconds to patch the weights with the LoRAs of an attempt."),
            )
        )
        self._engine = _Engine(registry)
        self._accelerations = {
            what: Gauge(f"bottega_worker_acceleration_{what}", text, ("acceleration",), registry=registry)
            for what, text in (
                ("kept", "1 if the worker uses the acceleration, 0 if its self-check turned it off."),
                ("speedup", "Plain time over accelerated time in the self-check; 0 if it was not timed."),
            )
        }
        self.memory_bytes = Gauge(
            "bottega_worker_memory_bytes", "Resident bytes of the worker and its child processes.", registry=registry
        )
        self.start_s = Gauge(
            "bottega_worker_engine_start_seconds",
            "Seconds that the newest engine took to start, until its model was ready.",
            registry=registry,
        )
        self._restarts = Counter(
            "bottega_worker_engine_restarts", "Engine processes that were lost.", registry=registry
        )

    def attempt_began(self) -> None:
        """Count an attempt that has started."""
        self._running.inc()

    def attempt_ended(self, outcome: str) -> None:
        """Count an attempt that has ended.

        Args:
            outcome: "completed", or the reason of its error.
        """
        self._running.dec()
        self._attempts.labels(outcome).inc()

    def steps_done(self, steps: int) -> None:
        """Count completed denoising steps."""
        self._steps.inc(steps)

    def observe_group(self, mean_requests: float) -> None:
        """Record the mean number of requests in the batches of an attempt."""
        self._group.observe(mean_requests)

    def observe_stages(self, times: Sequence[StageTime]) -> None:
        """Record the seconds of each stage of an attempt."""
        for time in times:
            self._stages.labels(time.stage).observe(time.seconds)

    def observe_loras(self, uses: Sequence[LoraUse]) -> None:
        """Record the LoRAs of an attempt. All of them share its waiting and patching times."""
        for use in uses:
            self._lora_load.observe(use.load_s)
        for use in uses[:1]:
            self._lora_wait.observe(use.wait_s)
            self._lora_patch.observe(use.patch_s)

    def observe_codec(self, work: str, seconds: float) -> None:
        """Record the seconds that a codec process took for one image. Previews are not counted.

        Args:
            work: "decode" or "encode".
        """
        self._codec.labels(work).observe(seconds)

    def set_beat(self, beat: EngineBeat) -> None:
        """Update the metrics with the engine's newest heartbeat."""
        self._engine.beat = beat

    def set_accelerations(self, accelerations: Sequence[Acceleration]) -> None:
        """Set the results of the newest engine's self-check of accelerations."""
        for gauge in self._accelerations.values():
            gauge.clear()
        for acceleration in accelerations:
            self._accelerations["kept"].labels(acceleration.name).set(acceleration.kept)
            self._accelerations["speedup"].labels(acceleration.name).set(acceleration.speedup)

    def activity(self) -> Activity:
        """Return the counts that the worker reports to the fleet."""
        ended = dict(totals(self._attempts))
        completed, _ = ended.pop(_COMPLETED, 0.0), ended.pop(_CANCELLED, 0.0)
        beat = self._engine.beat
        return Activity(completed=int(completed), failed=int(sum(ended.values())), steps=beat.steps, turns=beat.turns)

    def on_engine_lost(self) -> None:
        """Count an engine that died, hung or failed to start."""
        self._restarts.inc()
