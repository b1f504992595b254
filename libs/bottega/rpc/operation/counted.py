"""Reads the values of a process's own metrics, so that nothing is counted twice."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Histogram


def totals(counter: Counter) -> Mapping[str, float]:
    """Return the values of a counter with one label, by label value."""
    (family,) = counter.collect()
    return {
        value: sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
        for value in sample.labels.values()
    }


def count_and_sum(histogram: Histogram) -> tuple[int, float]:
    """Return the number and the sum of the observations of a histogram without labels."""
    (family,) = histogram.collect()
    values = {sample.name.removeprefix(family.name): sample.value for sample in family.samples if not sample.labels}
    return int(values["_count"]), values["_sum"]
