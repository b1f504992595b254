"""Quotas of tenants: what their jobs use of them, and the refusal of a job that would exceed one."""

from __future__ import annotations

from dataclasses import dataclass

from bottega.errors import QuotaExceeded
from bottega.rpc.security.tenant_file import Quotas

MINUTE_S, DAY_S = 60.0, 86_400
# Stored pictures are deleted with their jobs, at a time that cannot be predicted.
_STORED_RETRY_S = 60.0
# A waiting job may begin at any time.
_WAITING_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """The number of jobs and bytes of a tenant in the store."""

    jobs_today: int = 0
    """Number of jobs accepted since midnight UTC, including deleted ones."""
    stored_bytes: int = 0
    """Total bytes of the images of a tenant's jobs, and of the latents that are kept for edits."""
    jobs_in_minute: int = 0
    """Number of jobs accepted in the last 60 s."""
    oldest_in_minute: float | None = None
    """Time at which the first of them was accepted, in Unix seconds; None if there are none."""
    waiting: int = 0
    """Number of jobs that wait for a worker."""


def is_bounded(quotas: Quotas) -> bool:
    """Return whether there is a quota that limits new jobs."""
    return bool(quotas.queued or quotas.per_minute or quotas.per_day or quotas.stored_bytes)


def check_quotas(
    quotas: Quotas, usage: TenantUsage, *, now_wall: float, others: int = 0, waiting_retry_s: float = _WAITING_RETRY_S
) -> None:
    """Raise QuotaExceeded if a tenant that uses this much may not have another job now.

    Args:
        quotas: The quotas of the tenant.
        usage: The jobs and bytes that count.
        now_wall: The current Unix time in seconds.
        others: Number of further jobs that are being admitted.
        waiting_retry_s: Seconds until a waiting job is expected to begin.
    """
    if quotas.queued and usage.waiting + others >= quotas.queued:
        raise _exceeded("queued", quotas.queued, "jobs may wait", waiting_retry_s)
    if quotas.per_minute and usage.jobs_in_minute + others >= quotas.per_minute:
        oldest = usage.oldest_in_minute
        left_s = 1.0 if oldest is None else oldest + MINUTE_S - now_wall
        raise _exceeded("per_minute", quotas.per_minute, "jobs may be accepted in a minute", left_s)
    if quotas.per_day and usage.jobs_today + others >= quotas.per_day:
        left_s = DAY_S - now_wall % DAY_S
        raise _exceeded("per_day", quotas.per_day, "jobs may be accepted in a day (UTC)", left_s)
    if quotas.stored_bytes and usage.stored_bytes >= quotas.stored_bytes:
        raise _exceeded("stored_bytes", quotas.stored_bytes, "bytes of pictures may be stored", _STORED_RETRY_S)


def _exceeded(quota: str, most: int, what: str, retry_after_s: float) -> QuotaExceeded:
    return QuotaExceeded(
        f"your quota {quota} is used up: at most {most} {what}",
        metadata={"quota": quota, "most": str(most)},
        retry_after_s=max(0.1, retry_after_s),
    )
