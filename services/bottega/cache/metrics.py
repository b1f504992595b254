"""The metrics of an approximate cache: questions by outcome, skipped steps, bytes, evictions, links.

This module knows only numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bottega.cache.predictor.predictor import PredictorStatistics
from bottega.cache.store.statistics import LatentStatistics
from bottega.rpc.operation.link_metrics import link_metrics
from bottega.v1.link_pb2 import LinkCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """The figures of a cache at one moment."""

    store: LatentStatistics
    links: LinkCounts


class CacheMetrics(Collector):
    """The collector of the cache's metrics.

    Args:
        statistics: Called for every scrape, in a thread of its own.
    """

    def __init__(self, statistics: Callable[[], CacheStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        figures = self._statistics()
        yield from link_metrics(figures.links)
        store = figures.store
        yield _by("lookups", "Questions of workers, by outcome.", "outcome", store.lookups)
        yield _by("dropped", "Recordings that were not kept, by reason.", "reason", store.dropped)
        for name, text, value in (
            (
                "steps_skipped",
                "Denoising steps that pictures did not make because of its latents.",
                store.steps_skipped,
            ),
            ("recorded", "Recordings that were kept.", store.recorded),
            ("evictions", "Latents that were evicted.", store.evictions),
            ("holes", "Hits with fewer steps than allowed, as the latent of that step was evicted.", store.holes),
            ("damaged", "Latents that were found to be damaged, and deleted.", store.damaged),
        ):
            yield CounterMetricFamily(f"bottega_cache_{name}", text, value=value)
        for name, text, amount in (
            ("bytes", "Bytes of latents and of the pictures of their entries.", store.bytes),
            ("budget_bytes", "Bytes that latents and pictures may have.", store.budget_bytes),
            ("entries", "Pictures of which there are latents.", sum(model.entries for model in store.models)),
            ("latents", "Latents.", sum(model.latents for model in store.models)),
            ("keys", "Kinds of requests that there are latents of.", sum(model.keys for model in store.models)),
            ("waiting_bytes", "Bytes of recordings that wait to be written.", store.waiting_bytes),
            ("in_trouble", "Whether nothing can be recorded now.", int(bool(store.trouble))),
        ):
            yield GaugeMetricFamily(f"bottega_cache_{name}", text, value=amount)
        if store.predictor is not None:
            yield from _predictor(store.predictor)


def _predictor(figures: PredictorStatistics) -> Iterator[Metric]:
    outcomes = {"hit": figures.predicted_hits, "miss": figures.predicted_misses}
    yield _by("predictions", "Searches that were predicted to find something, or nothing.", "outcome", outcomes)
    yield CounterMetricFamily(
        "bottega_cache_searches_spared", "Searches not made, as predicted.", value=figures.skipped
    )
    for name, text, value in (
        ("on", "Whether a prediction may spare a search.", float(figures.on)),
        ("precision", "Share of the predicted hits that were, of late.", figures.rates.precision),
        ("recall", "Share of the hits that were predicted, of late.", figures.rates.recall),
    ):
        yield GaugeMetricFamily(f"bottega_cache_predictor_{name}", text, value=value)


def _by(name: str, text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"bottega_cache_{name}", text, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family
