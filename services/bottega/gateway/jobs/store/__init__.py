"""Jobs that outlive the gateway: what is kept of one, the rules of a store, and the store in one SQLite file."""

from bottega.gateway.jobs.store.job_store import JobStore
from bottega.gateway.jobs.store.record import EndTime, JobRecord, StoredPicture
from bottega.gateway.jobs.store.sqlite import SqliteJobStore

__all__ = ["EndTime", "JobRecord", "JobStore", "SqliteJobStore", "StoredPicture"]
