"""Storage that outlives a process: files by content hash, SQLite files, and a thread that does blocking work."""

from bottega.storage.blob_files import BlobFiles, ContentReader
from bottega.storage.content import ContentStore
from bottega.storage.sqlite_database import SqliteDatabase, SqliteFile, SqliteSchema
from bottega.storage.thread import SerialTask, SerialThread, TaskGroups

__all__ = [
    "BlobFiles",
    "ContentReader",
    "ContentStore",
    "SqliteDatabase",
    "SqliteFile",
    "SqliteSchema",
    "TaskGroups",
    "SerialTask",
    "SerialThread",
]
