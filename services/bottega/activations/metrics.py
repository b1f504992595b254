"""The Prometheus metrics of an activation store. They name no template."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bottega.activations.store.statistics import ActivationStatistics
from bottega.rpc.operation.link_metrics import link_metrics
from bottega.v1.link_pb2 import LinkCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationServerStatistics:
    """A store and its links at one moment."""

    store: ActivationStatistics
    links: LinkCounts


class ActivationMetrics(Collector):
    """A collector that calls `statistics` for every scrape, in a thread of its own."""

    def __init__(self, statistics: Callable[[], ActivationServerStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        figures = self._statistics()
        yield from link_metrics(figures.links)
        yield from _counters(figures.store)
        yield from _gauges(figures.store)


def _counters(store: ActivationStatistics) -> Iterator[Metric]:
    lookups = {"hit": store.hits, "miss": store.misses}
    yield _by("lookups", "Look-ups by workers, by whether the template was recorded.", "outcome", lookups)
    fetches = "Sections given to workers: from memory, loaded into memory, or from disk because memory had no room."
    yield _by("fetches", fetches, "tier", store.fetches)
    yield _by("dropped", "Sections and recordings that were not kept, by reason.", "reason", store.dropped)
    for name, text, value in (
        ("loads", "Files that were loaded into memory.", store.loads),
        ("loaded_bytes", "Bytes of the files that were loaded into memory.", store.loaded_bytes),
        ("load_seconds", "Seconds that loading took.", store.load_s),
        ("recorded", "Templates that were recorded.", store.recorded),
        ("recorded_sections", "Sections that were recorded, including replacements.", store.recorded_sections),
        ("evictions", "Templates that were evicted.", store.evictions),
        ("memory_evictions", "Files that were evicted from memory.", store.memory_evictions),
        ("damaged", "Damaged files that were found and dropped.", store.damaged),
    ):
        yield CounterMetricFamily(f"bottega_activations_{name}", text, value=value)


def _gauges(store: ActivationStatistics) -> Iterator[Metric]:
    used = {"memory": store.memory_bytes, "disk": store.disk_bytes}
    yield _amounts("bytes", "Bytes of activations, by tier. Everything in memory is on disk as well.", used)
    budgets = {"memory": store.memory_budget_bytes, "disk": store.disk_budget_bytes}
    yield _amounts("budget_bytes", "Upper bound on the bytes of activations, by tier.", budgets)
    for name, text, value in (
        ("templates", "Templates.", store.templates),
        ("sections", "Sections of all templates.", store.sections),
        ("pinned", "Templates that are never evicted.", store.pinned),
        ("recording", "Templates that are being recorded.", store.recording),
        ("waiting_bytes", "Bytes of sections that wait to be written.", store.waiting_bytes),
        ("disk_bytes_per_second", "Recent rate of loads from disk.", store.disk_bytes_per_s),
        ("in_trouble", "1 if nothing can be recorded now.", int(bool(store.trouble))),
    ):
        yield GaugeMetricFamily(f"bottega_activations_{name}", text, value=value)


def _by(name: str, text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"bottega_activations_{name}", text, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family


def _amounts(name: str, text: str, amounts: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"bottega_activations_{name}", text, labels=("tier",))
    for tier, value in amounts.items():
        family.add_metric((tier,), value)
    return family
