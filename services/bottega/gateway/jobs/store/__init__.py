"""The job store.

- `job_store`: the records, how they may change, and the interface, which every store must fulfil
- the sqlite modules: the store of a single machine
"""

from bottega.gateway.jobs.store.job_store import (
    ALL_JOBS,
    LIVE,
    Change,
    EndTime,
    JobFilter,
    JobProgress,
    JobRecord,
    JobStore,
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
