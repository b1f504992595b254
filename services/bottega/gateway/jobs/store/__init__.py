"""The job store.

- `job_store`: the records, how they may change, and the interface that every store implements
- the sqlite modules: the store of a gateway with a disk of its own
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
