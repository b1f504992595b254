"""The metrics of the gateway, except for those of its gRPC calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from bottega import kinds
from bottega.manifest import read_services
from bottega.rpc.operation.metrics import count_and_sum, gauge_by, totals
from bottega.v1.fleet_pb2 import Activity, Demand

# In seconds, from a picture of the embedded miniature model to the longest that callers wait for.
_JOB_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_QUEUE_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Routing has to take at most .6 ms.
_ROUTE_BUCKETS = (0.0001, 0.0002, 0.0004, 0.0006, 0.001, 0.002, 0.005, 0.01, 0.05)
_TENANT_BUCKETS = (0.5, 1, 2.5, 5, 10, 30, 60, 300)
# From a disk that caches writes to a spinning disk.
_COMMIT_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)

OTHERS = "(others)"
"""The label of all tenants without a label of their own. No tenant can have this name."""


class GatewayMetrics:
    """The Prometheus metrics of the gateway.

    Args:
        registry: Registry of the gateway's process.
        named_tenants: Number of tenants with a label of their own; 0 keeps no metrics by tenant.
    """

    def __init__(self, registry: CollectorRegistry, *, named_tenants: int = 0) -> None:
        self._tenants = _TenantMetrics(registry, most=named_tenants) if named_tenants else None
        self._jobs_ended = Counter("bottega_jobs", "Jobs that ended, by outcome.", ("outcome",), registry=registry)
        self._aborted = Counter(
            "bottega_jobs_aborted",
            "Jobs that failed or were cancelled, by the reason of their error. job_cancelled: a caller cancelled it.",
            ("reason",),
            registry=registry,
        )
        self._job_s = Histogram(
            "bottega_job_seconds",
            "Seconds from a job's acceptance to its completion.",
            buckets=_JOB_BUCKETS,
            registry=registry,
        )
        self.refused = Counter("bottega_refused", "Requests refused, by reason.", ("reason",), registry=registry)
        self.attempts_lost = Counter(
            "bottega_attempts_lost", "Attempts whose worker died or disconnected.", registry=registry
        )
        self.attempts_returned = Counter(
            "bottega_attempts_returned", "Attempts that a worker refused or returned.", registry=registry
        )
        self._queue_s = Histogram(
            "bottega_queue_seconds",
            "Seconds from the acceptance of a job, or its return, until a worker was free.",
            buckets=_QUEUE_BUCKETS,
            registry=registry,
        )
        self._route_s = Histogram(
            "bottega_route_seconds",
            "Seconds to call RunAttempt, from when the job was accepted and a worker was free.",
            buckets=_ROUTE_BUCKETS,
            registry=registry,
        )
        self.acknowledged = Counter("bottega_jobs_acknowledged", "Jobs that were stored durably.", registry=registry)
        self.identical_results = Counter(
            "bottega_identical_results",
            "Requests for which a stored result was looked for, by what was found: answered, none, gone (its pictures"
            " are), failed (the disk).",
            ("outcome",),
            registry=registry,
        )
        self.commit_s = Histogram(
            "bottega_store_commit_seconds",
            "Seconds of each commit of the job store. A commit writes a group of operations.",
            buckets=_COMMIT_BUCKETS,
            registry=registry,
        )
        self.store_waiting = Gauge(
            "bottega_store_waiting", "Operations that wait for the next commit of the job store.", registry=registry
        )
        self.store_in_trouble = Gauge(
            "bottega_store_in_trouble", "1 while jobs and pictures cannot be stored, else 0.", registry=registry
        )
        self.image_bytes = Gauge("bottega_image_bytes", "Total bytes of the stored pictures.", registry=registry)
        self.image_budget_bytes = Gauge(
            "bottega_image_budget_bytes", "Upper bound on the total bytes of stored pictures.", registry=registry
        )
        self.checkpoints = Counter(
            "bottega_checkpoints",
            "Checkpoints of running jobs in the object storage, by outcome: stored, restored at a new scheduler, lost"
            " (gone or damaged), failed (a call of the storage).",
            ("outcome",),
            registry=registry,
        )
        self.queued = Gauge("bottega_queued_jobs", "Jobs that wait for a worker.", registry=registry)
        self.longest_wait = Gauge(
            "bottega_longest_wait_seconds",
            "Longest time in seconds that a waiting job has waited.",
            registry=registry,
        )
        self.scheduler = Gauge(
            "bottega_scheduler",
            "1 while this gateway schedules the jobs; of those that share jobs one does, else 0.",
            registry=registry,
        )
        self.running = Gauge("bottega_running_jobs", "Jobs that are running on a worker.", registry=registry)
        self.signing_expires = Gauge(
            "bottega_signing_certificate_expires_timestamp_seconds",
            "Unix time at which the certificate that signs pictures expires; 0 if they are not signed.",
            registry=registry,
        )
        self.webhooks = WebhookMetrics(registry)
        self._registry = registry

    def job_ended(self, outcome: str, *, seconds: float, reason: str, tenant: str) -> None:
        """Count a job that ended.

        Args:
            outcome: completed, failed or cancelled.
            seconds: Seconds since the job was accepted.
            reason: Reason of the job's error; "" if it completed.
            tenant: Tenant of the job.
        """
        if self._tenants is not None:
            self._tenants.job_ended(tenant, outcome, seconds=seconds)
        self._jobs_ended.labels(outcome).inc()
        if reason:
            self._aborted.labels(reason).inc()
        else:
            self._job_s.observe(seconds)

    def routed(self, *, queue_s: float, route_s: float) -> None:
        """Record how long a job waited for a free worker, and how long the call to the worker took from then."""
        self._queue_s.observe(queue_s)
        self._route_s.observe(route_s)

    def activity(self) -> Activity:
        """Return the gateway's counters for the list of fleet members."""
        ended = totals(self._jobs_ended)
        routed, waited_s = count_and_sum(self._queue_s)
        return Activity(
            completed=int(ended.get("completed", 0)),
            failed=int(ended.get("failed", 0)),
            routed=routed,
            waited_s=waited_s,
        )

    def register_members(self, kinds: Callable[[], Iterable[str]]) -> None:
        """Count members in a gauge; `kinds` returns the kind of each service in the fleet."""
        self._registry.register(_Members(kinds))

    def register_demand(self, demand: Callable[[], Iterable[Demand]]) -> None:
        """Show the demand for services in gauges; `demand` returns the newest forecast, in any thread."""
        self._registry.register(_Demand(demand))

    def register_tenants(self, waiting: Callable[[], Mapping[str, int]]) -> None:
        """Count waiting jobs by tenant in a gauge, if metrics by tenant are kept.

        Args:
            waiting: Returns the number of each tenant's waiting jobs; called in any thread.
        """
        if self._tenants is not None:
            self._registry.register(_Waiting(self._tenants, waiting))


class WebhookMetrics:
    """The metrics of webhooks.

    Attributes:
        oldest_wall: When the job of the oldest undelivered event ended, in Unix seconds; None if there is none.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.oldest_wall: float | None = None
        self.deliveries = Counter(
            "bottega_webhook_deliveries", "Deliveries of webhooks, by outcome.", ("outcome",), registry=registry
        )
        for outcome in ("delivered", "failed"):
            self.deliveries.labels(outcome)
        self.given_up = Counter(
            "bottega_webhooks_given_up", "Webhooks that were not accepted in time, or found no room.", registry=registry
        )
        self.dropped = Counter(
            "bottega_webhooks_dropped",
            "Webhooks that are lost: too many were given up, or their rows are damaged.",
            registry=registry,
        )
        self.waiting = Gauge("bottega_webhooks_waiting", "Webhooks that wait for their delivery.", registry=registry)
        self.dead = Gauge(
            "bottega_webhooks_dead", "Webhooks that were given up and can be replayed.", registry=registry
        )
        oldest = Gauge(
            "bottega_webhook_oldest_seconds",
            "Seconds since the end of the job whose webhook has waited longest; 0 if none waits.",
            registry=registry,
        )
        oldest.set_function(lambda: 0.0 if self.oldest_wall is None else max(0.0, time.time() - self.oldest_wall))


class _Members(Collector):
    """A gauge of members by kind. Kinds of this suite are always present; other kinds while a member has them."""

    def __init__(self, kinds: Callable[[], Iterable[str]]) -> None:
        self._kinds = kinds
        self._own_kinds = [service.kind for service in read_services()]

    def collect(self) -> Iterator[Metric]:
        counts = dict.fromkeys(self._own_kinds, 0)
        for kind in self._kinds():
            counts[kind] = counts.get(kind, 0) + 1
        yield gauge_by("kind", "bottega_members", "Services that have joined, by kind.", counts)


class _Demand(Collector):
    """Gauges of the demand for services, by kind and model."""

    def __init__(self, demand: Callable[[], Iterable[Demand]]) -> None:
        self._demand = demand

    def collect(self) -> Iterator[Metric]:
        labels = ("kind", "model")
        desired = GaugeMetricFamily(
            "bottega_desired_services", "Services of a kind that a model needs now.", labels=labels
        )
        ready = GaugeMetricFamily("bottega_ready_services", "Services of a kind that a model has.", labels=labels)
        waiting = GaugeMetricFamily(
            "bottega_waiting_work_seconds", "Seconds of a device that a model's waiting jobs take.", labels=("model",)
        )
        for each in self._demand():
            desired.add_metric((each.kind, each.model), each.desired)
            ready.add_metric((each.kind, each.model), each.ready)
            if each.kind == kinds.WORKER:
                waiting.add_metric((each.model,), each.waiting_s)
        yield from (desired, ready, waiting)


class _TenantMetrics:
    """The metrics of the first `most` tenants by name, and of all other tenants together."""

    def __init__(self, registry: CollectorRegistry, *, most: int) -> None:
        self._most = most
        self._named: set[str] = set()
        self._ended = Counter(
            "bottega_tenant_jobs", "Jobs of a tenant that ended, by outcome.", ("tenant", "outcome"), registry=registry
        )
        self._job_s = Histogram(
            "bottega_tenant_job_seconds",
            "Seconds from a job's acceptance to its completion, by tenant.",
            ("tenant",),
            buckets=_TENANT_BUCKETS,
            registry=registry,
        )

    def job_ended(self, tenant: str, outcome: str, *, seconds: float) -> None:
        """Count a job that ended `seconds` after it was accepted."""
        label = self.label(tenant)
        self._ended.labels(label, outcome).inc()
        if outcome == "completed":
            self._job_s.labels(label).observe(seconds)

    def label(self, tenant: str) -> str:
        """Return the label of a tenant: its name, or OTHERS once `most` other tenants have labels."""
        if tenant not in self._named and len(self._named) < self._most:
            self._named.add(tenant)
        return tenant if tenant in self._named else OTHERS


class _Waiting(Collector):
    """A gauge of waiting jobs by tenant."""

    def __init__(self, tenants: _TenantMetrics, waiting: Callable[[], Mapping[str, int]]) -> None:
        self._tenants = tenants
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        counts: dict[str, int] = {}
        for tenant, jobs in self._waiting().items():
            label = self._tenants.label(tenant)
            counts[label] = counts.get(label, 0) + jobs
        yield gauge_by("tenant", "bottega_tenant_queued", "Jobs of a tenant that wait for a worker.", counts)
