"""The metrics of a LoRA store: fetches by tier, loads, bytes, imports, links."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bottega.caching import Tier, TierStatistics
from bottega.rpc.operation.link_metrics import link_metrics
from bottega.v1.link_pb2 import LinkCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    """The store's figures at one moment."""

    counts: TierStatistics
    memory_bytes: int
    memory_budget_bytes: int
    disk_bytes: int
    """Size of the LoRAs on the disk, without the quarantine."""
    disk_budget_bytes: int
    quarantined_bytes: int
    reserved_bytes: int
    """Disk space reserved for running uploads and imports."""
    links: LinkCounts


def import_counter(registry: CollectorRegistry) -> Counter:
    """Return a counter of imports by outcome: "added", or the reason of the error."""
    return Counter("bottega_lora_imports", "Imports of LoRAs, by outcome.", ("outcome",), registry=registry)


class LoraMetrics(Collector):
    """A collector of the store's figures.

    Args:
        statistics: Called for every scrape, in another thread.
    """

    def __init__(self, statistics: Callable[[], StoreStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """Yield the store's present figures."""
        figures = self._statistics()
        yield from link_metrics(figures.links)
        counts = figures.counts
        fetches = CounterMetricFamily(
            "bottega_lora_fetches",
            "LoRAs that workers fetched, by where they were: in memory, prefetched into it, or on the disk.",
            labels=("tier",),
        )
        for tier in Tier:
            fetches.add_metric((tier.value,), counts.by_tier[tier])
        yield fetches
        for name, text, value in (
            ("loads", "LoRAs that were loaded into memory.", counts.loads),
            ("loaded_bytes", "Bytes that were loaded into memory.", counts.loaded_bytes),
            ("load_seconds", "Seconds that loading took.", counts.load_s),
            ("load_failures", "Loads that failed.", counts.failures),
            ("evictions", "LoRAs that were evicted from memory.", counts.evictions),
        ):
            yield CounterMetricFamily(f"bottega_lora_{name}", text, value=value)
        yield GaugeMetricFamily(
            "bottega_lora_memory_bytes",
            "Bytes of LoRAs in memory, shared by the workers of its host.",
            value=figures.memory_bytes,
        )
        budget = GaugeMetricFamily("bottega_lora_budget_bytes", "Bytes that LoRAs may use, by tier.", labels=("tier",))
        budget.add_metric(("memory",), figures.memory_budget_bytes)
        budget.add_metric(("disk",), figures.disk_budget_bytes)
        yield budget
        for name, text, value in (
            ("disk_bytes", "Bytes of LoRAs on the disk.", figures.disk_bytes),
            ("quarantined_bytes", "Bytes of files in quarantine.", figures.quarantined_bytes),
            ("reserved_bytes", "Bytes of the disk reserved for running uploads and imports.", figures.reserved_bytes),
        ):
            yield GaugeMetricFamily(f"bottega_lora_{name}", text, value=value)
