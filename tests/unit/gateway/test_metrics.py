"""Metrics by tenant: of a bounded number of them, whoever calls."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from bottega.gateway.metrics import OTHERS, GatewayMetrics


def test_the_first_tenants_are_shown_by_name_and_all_others_together() -> None:
    registry = CollectorRegistry()
    waiting = {"a": 2, "c": 3, "d": 4} | {f"t{number}": 1 for number in range(500)}
    metrics = GatewayMetrics(registry, named_tenants=2)
    metrics.register_tenants(lambda: waiting)
    for tenant in ("a", "b", *waiting):
        metrics.job_ended("completed", seconds=1.5, reason="", tenant=tenant)
    metrics.job_ended("failed", seconds=0.1, reason="internal", tenant="b")

    def read(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert read("bottega_tenant_jobs_total", tenant="a", outcome="completed") == 2
    assert read("bottega_tenant_jobs_total", tenant="b", outcome="failed") == 1
    assert read("bottega_tenant_jobs_total", tenant=OTHERS, outcome="completed") == 502
    assert read("bottega_tenant_job_seconds_count", tenant="b") == 1
    assert read("bottega_tenant_queued", tenant="a") == 2
    assert read("bottega_tenant_queued", tenant=OTHERS) == 507
    labels = [sample.labels for metric in registry.collect() for sample in metric.samples]
    assert {each["tenant"] for each in labels if "tenant" in each} == {"a", "b", OTHERS}
