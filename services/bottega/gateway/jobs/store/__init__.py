"""The job store.

- `job_store`: the records, how they may change, and the interface that every store implements
- `outbox`: the webhook events of ended jobs, which the store keeps until they are delivered
- `quotas`: what quotas of tenants limit, and the refusal of a job that exceeds one
- the sqlite modules: the store of a gateway with a disk of its own
- the postgresql modules: the store of several gateways; they need the extra `postgresql`
"""

from bottega.gateway.jobs.store.job_store import (
    ALL_JOBS,
    LIVE,
    Change,
    EndTime,
    EventOf,
    JobFilter,
    JobProgress,
    JobRecord,
    JobStore,
    NotAdded,
    RemovedJobs,
    StaleGeneration,
    no_event,
)
from bottega.gateway.jobs.store.outbox import Outbox, OutboxEvent, OutboxPlace
from bottega.gateway.jobs.store.quotas import TenantUsage
from bottega.gateway.jobs.store.sqlite import SqliteJobStore

__all__ = [
    "ALL_JOBS",
    "LIVE",
    "Change",
    "EndTime",
    "EventOf",
    "JobFilter",
    "JobProgress",
    "JobRecord",
    "JobStore",
    "NotAdded",
    "Outbox",
    "OutboxEvent",
    "OutboxPlace",
    "RemovedJobs",
    "StaleGeneration",
    "TenantUsage",
    "SqliteJobStore",
    "no_event",
]
