"""Metric families of tables, tensor links and devices, and the values of a process's own metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from bottega.transport import LinkCounters
from bottega.v1.device_pb2 import DeviceMemory
from bottega.v1.link_pb2 import LinkCounts


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
    """Return the count and the sum of a histogram's observations. The histogram must have no labels."""
    (family,) = histogram.collect()
    values = {sample.name.removeprefix(family.name): sample.value for sample in family.samples if not sample.labels}
    return int(values["_count"]), values["_sum"]


def link_counts(counters: LinkCounters, *, open_links: int) -> LinkCounts:
    """Convert the counters of a process's links to their message."""
    now = counters.snapshot()
    return LinkCounts(
        open=open_links,
        sent_messages=now.sent.messages,
        sent_bytes=now.sent.size_bytes,
        sent_s=now.sent.seconds,
        sent_file_bytes=now.sent.file_bytes,
        received_messages=now.received.messages,
        received_bytes=now.received.size_bytes,
        received_s=now.received.seconds,
        received_file_bytes=now.received.file_bytes,
        credit_wait_s=now.credit_wait_s,
        no_credit=now.no_credit,
        aborted=now.aborted,
        deaths=now.deaths,
    )


def link_metrics(counts: LinkCounts) -> Iterator[Metric]:
    """Yield metrics of links from the last report of a service's engine. A new engine starts at 0."""
    yield from gauges("bottega", ("links", "Tensor links that are open.", counts.open))
    for name, text, sent, received in (
        ("messages", "Complete messages over tensor links.", counts.sent_messages, counts.received_messages),
        ("bytes", "Bytes of complete messages over tensor links.", counts.sent_bytes, counts.received_bytes),
        (
            "file_bytes",
            "Bytes of files that messages shared as memory instead of copying.",
            counts.sent_file_bytes,
            counts.received_file_bytes,
        ),
        ("seconds", "Seconds that complete messages took over tensor links.", counts.sent_s, counts.received_s),
    ):
        yield counter_by("direction", f"bottega_link_{name}", text, {"sent": sent, "received": received})
    yield from counters(
        "bottega_link",
        ("credit_wait_seconds", "Seconds that senders waited for a free receive buffer.", counts.credit_wait_s),
        ("no_credit", "Waits for a free receive buffer that timed out.", counts.no_credit),
        ("aborted", "Messages that were withdrawn before they were sent.", counts.aborted),
    )
    yield counter_by("cause", "bottega_link_deaths", "Tensor links that ended, by cause.", counts.deaths)


def device_metrics(memory: DeviceMemory) -> Iterator[Metric]:
    """Yield metrics of the device from the last report of a service's engine. All are 0 on a CPU."""
    text = "Bytes of device memory that are reserved, by purpose."
    yield gauge_by("holder", "bottega_device_held_bytes", text, memory.held_bytes)
    yield from gauges(
        "bottega_device",
        ("budget_bytes", "Upper bound on the device memory of the engine; 0 on a CPU.", memory.budget_bytes),
        ("allocated_bytes", "Device memory that the engine's tensors use; 0 on a CPU.", memory.allocated_bytes),
        ("free_bytes", "Bytes of device memory that no process uses; 0 on a CPU.", memory.free_bytes),
    )
