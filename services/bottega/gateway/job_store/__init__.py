"""Jobs that outlive the gateway: what is kept of one, the rules of a store, and the store in one SQLite file."""

from bottega.gateway.job_store.records import End, JobRecord, StoredPicture
from bottega.gateway.job_store.sqlite import SqliteJobStore
from bottega.gateway.job_store.store import JobStore

__all__ = ["End", "JobRecord", "JobStore", "SqliteJobStore", "StoredPicture"]
