"""The job store.

record says what is kept of a job, result_keys by what its results are found, job_store what every store promises; the
sqlite modules are the store of a single machine.
"""

from bottega.gateway.jobs.store.job_store import JobStore
from bottega.gateway.jobs.store.record import (
    ALL_JOBS,
    LIVE,
    Change,
    EndTime,
    JobFilter,
    JobProgress,
    JobRecord,
    TenantUsage,
)
from bottega.gateway.jobs.store.sqlite import SqliteJobStore

__all__ = [
    "ALL_JOBS",
    "LIVE",
    "Change",
    "EndTime",
    "JobFilter",
    "JobProgress",
    "JobRecord",
    "JobStore",
    "TenantUsage",
    "SqliteJobStore",
]
