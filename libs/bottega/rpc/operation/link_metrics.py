"""Traffic of tensor links, as a message between processes and as metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from bottega.transport import LinkCounters
from bottega.v1.link_pb2 import LinkCounts


def link_counts(counters: LinkCounters, *, open_links: int) -> LinkCounts:
    """Return the current counters of a process."""
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
    """Yield metrics of the last report of a service's engine. A new engine starts at 0."""
    yield GaugeMetricFamily("bottega_links", "Tensor links that are open.", value=counts.open)
    for name, text, sent, received in (
        ("messages", "Whole messages over tensor links.", counts.sent_messages, counts.received_messages),
        ("bytes", "Bytes of whole messages over tensor links.", counts.sent_bytes, counts.received_bytes),
        (
            "file_bytes",
            "Bytes of files that messages carried: shared by both ends, not moved.",
            counts.sent_file_bytes,
            counts.received_file_bytes,
        ),
        ("seconds", "Seconds that whole messages took over tensor links.", counts.sent_s, counts.received_s),
    ):
        family = CounterMetricFamily(f"bottega_link_{name}", text, labels=("direction",))
        family.add_metric(("sent",), sent)
        family.add_metric(("received",), received)
        yield family
    yield CounterMetricFamily(
        "bottega_link_credit_wait_seconds", "Seconds of waiting for a link's credit.", value=counts.credit_wait_s
    )
    yield CounterMetricFamily("bottega_link_no_credit", "Waits for credit in vain.", value=counts.no_credit)
    yield CounterMetricFamily("bottega_link_aborted", "Messages taken back.", value=counts.aborted)
    deaths = CounterMetricFamily("bottega_link_deaths", "Links that ended, by cause.", labels=("cause",))
    for cause, count in counts.deaths.items():
        deaths.add_metric((cause,), count)
    yield deaths
