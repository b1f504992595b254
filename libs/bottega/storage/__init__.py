"""What outlives a process: files by content hash, SQLite files, and the thread that blocking work is done in."""

from bottega.storage.content import ContentReader, ContentStore
from bottega.storage.sqlite_database import SqliteDatabase, SqliteFile, SqliteSchema
from bottega.storage.thread import StorageTask, StorageThread

__all__ = [
    "ContentReader",
    "ContentStore",
    "SqliteDatabase",
    "SqliteFile",
    "SqliteSchema",
    "StorageTask",
    "StorageThread",
]
