"""Reports as ghz writes them with `--format json`: the fields of its type Report, times in nanoseconds."""

from __future__ import annotations

from typing import Any

_MS = 1_000_000


def ghz_report(method: str = "GetJob", profile: str = "steady", *, count: int = 3000, **changed: Any) -> dict[str, Any]:
    """A good run of a minute at most. changed: fields of the report; options and its own are merged."""
    options = {
        "call": f"bottega.v1.ImageService/{method}",
        "host": "127.0.0.1:8470",
        "insecure": True,
        "load-schedule": "const",
        "load-start": 0,
        "load-end": 0,
        "load-step": 0,
        "load-step-duration": 0,
        "load-max-duration": 0,
        "concurrency": 50,
        "concurrency-schedule": "const",
        "total": count,
        "connections": 1,
        "timeout": 10_000 * _MS,
        "dial-timeout": 10_000 * _MS,
        "data": {"job_id": "a job"},
        "binary": False,
        "CPUs": 2,
        "name": f"{profile} {method}",
    }
    options |= {"rps": 100, "async": True} if profile == "steady" else {}
    report = {
        "name": f"{profile} {method}",
        "endReason": "normal",
        "options": options | changed.pop("options", {}),
        "date": "2026-02-01T10:00:00Z",
        "count": count,
        "total": 30_000 * _MS,
        "average": 4 * _MS,
        "fastest": 1 * _MS,
        "slowest": 30 * _MS,
        "rps": 99.98,
        "errorDistribution": {},
        "statusCodeDistribution": {"OK": count},
        "latencyDistribution": [
            {"percentage": percentage, "latency": latency}
            for percentage, latency in ((10, 1 * _MS), (50, 3 * _MS), (90, 8 * _MS), (95, 12 * _MS), (99, 25 * _MS))
        ],
        "histogram": [
            {"mark": 0.001, "count": 1, "frequency": 0.0003},
            {"mark": 0.03, "count": 2999, "frequency": 0.9997},
        ],
        "details": [{"timestamp": "2026-02-01T10:00:00Z", "latency": 3 * _MS, "error": "", "status": "OK"}],
        "tags": {"profile": profile},
    }
    return report | changed
