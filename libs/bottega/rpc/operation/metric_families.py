"""Metric families for collectors, built from tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


def counters(prefix: str, *rows: tuple[str, str, float]) -> Iterator[Metric]:
    """Yield a counter for each row: name without prefix, help text, value."""
    for name, text, value in rows:
        yield CounterMetricFamily(f"{prefix}_{name}", text, value=value)


def gauges(prefix: str, *rows: tuple[str, str, float]) -> Iterator[Metric]:
    """Yield a gauge for each row: name without prefix, help text, value."""
    for name, text, value in rows:
        yield GaugeMetricFamily(f"{prefix}_{name}", text, value=value)


def counter_by(label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with a label. `values` has a count for each value of the label."""
    return _with_label(CounterMetricFamily(name, text, labels=(label,)), values)


def gauge_by(label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with a label. `values` has an amount for each value of the label."""
    return _with_label(GaugeMetricFamily(name, text, labels=(label,)), values)


def _with_label(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for value, amount in values.items():
        family.add_metric((value,), amount)
    return family
