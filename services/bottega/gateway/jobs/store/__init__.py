"""The job store: what is kept of a job (record), by what its results are found (result_keys), the interface of a store
(job_store), and the one in SQLite.
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
