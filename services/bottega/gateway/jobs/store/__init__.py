"""The job store.

- `record`: the record of a job, and how it may change
- `result_keys`: the keys by which stored results are found
- `job_store`: the interface, which every store must fulfil
- the sqlite modules: the store of a single machine
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
