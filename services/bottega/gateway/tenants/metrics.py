"""What tenants do, in metrics of their own: off unless asked for, and of a bounded number of tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

# Of all tenants beyond the bound, together. No tenant can have this name.
OTHERS = "(others)"
_BUCKETS = (0.5, 1, 2.5, 5, 10, 30, 60, 300)


class TenantMetrics:
    """Of the first `most` tenants that have a job, by name, and of all others together.

    waiting: jobs that wait, by tenant; any thread may ask.
    """

    def __init__(self, registry: CollectorRegistry, *, most: int, waiting: Callable[[], Mapping[str, int]]) -> None:
        self._most = most
        self._waiting = waiting
        self._named: set[str] = set()
        self._ended = Counter(
            "bottega_tenant_jobs", "Jobs of a tenant that ended, by outcome.", ("tenant", "outcome"), registry=registry
        )
        self._job_s = Histogram(
            "bottega_tenant_job_seconds",
            "Seconds from a job's acceptance to its completion, by tenant.",
            ("tenant",),
            buckets=_BUCKETS,
            registry=registry,
        )
        registry.register(_Waiting(self))

    def job_ended(self, tenant: str, outcome: str, *, seconds: float) -> None:
        """Takes in how a job ended. seconds: since its acceptance."""
        shown = self.shown(tenant)
        self._ended.labels(shown, outcome).inc()
        if outcome == "completed":
            self._job_s.labels(shown).observe(seconds)

    def shown(self, tenant: str) -> str:
        """The label of a tenant."""
        if tenant not in self._named and len(self._named) < self._most:
            self._named.add(tenant)
        return tenant if tenant in self._named else OTHERS

    def waiting(self) -> Mapping[str, int]:
        """Jobs that wait, by label; none of those that have none."""
        found: dict[str, int] = {}
        for tenant, jobs in self._waiting().items():
            shown = self.shown(tenant)
            found[shown] = found.get(shown, 0) + jobs
        return found


class _Waiting(Collector):
    def __init__(self, tenants: TenantMetrics) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            "bottega_tenant_queued", "Jobs of a tenant that wait for a worker.", labels=["tenant"]
        )
        for tenant, jobs in self._tenants.waiting().items():
            gauge.add_metric([tenant], jobs)
        yield gauge
