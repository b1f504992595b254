"""What outlives a process: files by content hash, and the thread that blocking storage work is done in."""

from bottega.storage.content import ContentReader, ContentStore
from bottega.storage.thread import StorageTask, StorageThread

__all__ = ["ContentReader", "ContentStore", "StorageThread", "StorageTask"]
