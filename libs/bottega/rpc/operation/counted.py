"""What a process's own metrics have counted, read back by the process itself, so that nothing is counted twice."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Histogram


def totals(counter: Counter) -> Mapping[str, float]:
    """A counter with one label, by the values of that label that have been counted."""
    (family,) = counter.collect()
    return {
        value: sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
        for value in sample.labels.values()
    }


def count_and_sum(histogram: Histogram) -> tuple[int, float]:
    """How often a histogram without labels has observed something, and the sum of that."""
    (family,) = histogram.collect()
    values = {sample.name.removeprefix(family.name): sample.value for sample in family.samples if not sample.labels}
    return int(values["_count"]), values["_sum"]
